//! The address of `_PyRuntime` in a process that does not tell it: by the symbol in its libpython, or in its executable.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM, SHT_SYMTAB, Sym64};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};
use thiserror::Error;

use super::{Memory, Runtime, Version};

/// Most bytes of `/proc/PID/maps` that are read.
const MAPS_LIMIT_BYTES: u64 = 8 << 20;
/// Largest table of symbols, or of their names, that is read.
const TABLE_LIMIT_BYTES: u64 = 64 << 20;
/// Most mapped files that are looked at: a libpython, and the executable.
const FILE_LIMIT: usize = 4;
const PAGE: u64 = 4096;

/// Why `_PyRuntime` was not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotFound {
    /// The process cannot be looked at.
    #[error("its mapped files cannot be listed (/proc/PID/maps): it has ended, or belongs to another user")]
    NoMaps,
    /// There is no such symbol.
    #[error(
        "neither its executable nor a libpython of its exports `_PyRuntime`: it runs no Python, or one without symbols"
    )]
    NoSymbol,
}

/// A file of which a process has mapped something.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapped {
    path: String,
    /// Where it is mapped first, and from which of its bytes on.
    address: u64,
    offset: u64,
}

/// Find where a process's Python is, and by its memory which. May hang if its executable is on a dead file system.
///
/// # Errors
/// It is not there.
pub fn runtime(pid: u32, memory: &dyn Memory) -> Result<Runtime, NotFound> {
    let mut maps = Vec::new();
    let file = File::open(format!("/proc/{pid}/maps")).map_err(|_| NotFound::NoMaps)?;
    file.take(MAPS_LIMIT_BYTES).read_to_end(&mut maps).map_err(|_| NotFound::NoMaps)?;
    let executable = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| NotFound::NoMaps)?;
    let executable = executable.to_string_lossy();
    let files = candidates(&String::from_utf8_lossy(&maps), &executable);
    files
        .iter()
        .take(FILE_LIMIT)
        .find_map(|mapped| {
            // The link leads to the file even if it has been removed, or is in another mount namespace.
            let path = if mapped.path == executable {
                format!("/proc/{pid}/exe")
            } else {
                format!("/proc/{pid}/root{}", mapped.path)
            };
            let symbols = symbols(&path, mapped)?;
            let mut hex = [0; 4];
            let known = symbols.version.filter(|address| memory.read(*address, &mut hex).is_ok());
            let version = known.map(|_| Version::of_hex(u32::from_ne_bytes(hex))).or_else(|| version_of(&mapped.path));
            Some(Runtime { address: symbols.runtime, version })
        })
        .ok_or(NotFound::NoSymbol)
}

/// The files that may have the symbol, libpython first.
fn candidates(maps: &str, executable: &str) -> Vec<Mapped> {
    let mut found: Vec<Mapped> = Vec::new();
    for line in maps.lines() {
        let Some(mapped) = parse(line) else { continue };
        let is_library = mapped.path.rsplit('/').next().is_some_and(|name| name.starts_with("libpython3."));
        if (is_library || mapped.path == executable) && found.iter().all(|other| other.path != mapped.path) {
            let at = if is_library { 0 } else { found.len() };
            found.insert(at, mapped);
        }
    }
    found
}

/// A line of `/proc/PID/maps`: `55d0-55e1 r--p 00000000 fe:00 123   /usr/bin/python3.11`.
fn parse(line: &str) -> Option<Mapped> {
    let (range, rest) = line.split_once(' ')?;
    let mut fields = rest.splitn(4, ' ');
    let (_, offset, _) = (fields.next()?, fields.next()?, fields.next()?);
    let (_, path) = fields.next()?.split_once(' ')?;
    let path = path.trim_start();
    let (address, _) = range.split_once('-')?;
    path.starts_with('/').then_some(())?;
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    Some(Mapped { path: path.to_owned(), address: number(address)?, offset: number(offset)? })
}

/// `libpython3.12.so.1.0`, `python3.12`.
fn version_of(path: &str) -> Option<Version> {
    let name = path.rsplit('/').next()?;
    let (_, minor) = name.split_once("python3.")?;
    let digits = minor.split(|c: char| !c.is_ascii_digit()).next()?;
    Some(Version { major: 3, minor: digits.parse().ok()? })
}

/// Addresses in the process.
struct Symbols {
    runtime: u64,
    version: Option<u64>,
}

fn symbols(path: &str, mapped: &Mapped) -> Option<Symbols> {
    // A named pipe in the file's place must not be waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let data = &ReadCache::new(file);
    let header = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    // A file with more than 65,535 sections counts them elsewhere, in any number.
    if header.e_shnum(endian) == 0 || header.e_phnum(endian) == 0xffff {
        return None;
    }
    let segments = header.program_headers(endian, data).ok()?;
    let moved = segments.iter().find_map(|segment| {
        // The kernel maps whole pages.
        let (address, offset) = (segment.p_vaddr(endian), segment.p_offset(endian));
        let end = offset.checked_add(segment.p_filesz(endian))?;
        let begin = offset & !(PAGE - 1);
        let holds = segment.p_type(endian) == object::elf::PT_LOAD && (begin..end).contains(&mapped.offset);
        let mapped_at = (address & !(PAGE - 1)).wrapping_add(mapped.offset.wrapping_sub(begin));
        holds.then(|| mapped.address.wrapping_sub(mapped_at))
    })?;

    let sections = header.sections(endian, data).ok()?;
    let small = |section: &&object::elf::SectionHeader64<Endianness>| section.sh_size(endian) <= TABLE_LIMIT_BYTES;
    [SHT_DYNSYM, SHT_SYMTAB].into_iter().find_map(|kind| {
        let table = sections.iter().find(|section| section.sh_type(endian) == kind).filter(small)?;
        let names = sections.section(table.link(endian)).ok().filter(small)?.data(endian, data).ok()?;
        let table: &[Sym64<Endianness>] = table.data_as_array(endian, data).ok()?;
        let address = |name: &[u8]| {
            let symbol = table.iter().find(|symbol| {
                let at = usize::try_from(symbol.st_name(endian)).unwrap_or(usize::MAX);
                symbol.st_value(endian) != 0 && names.get(at..).is_some_and(|names| names.starts_with(name))
            })?;
            Some(symbol.st_value(endian).wrapping_add(moved))
        };
        Some(Symbols { runtime: address(b"_PyRuntime\0")?, version: address(b"Py_Version\0") })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_libpython_is_looked_at_before_the_executable() {
        let maps = "\
55d0c000-55d0d000 r--p 00000000 fe:00 17                         /opt/my python/bin/python3.12
55d0d000-55d0e000 r-xp 00001000 fe:00 17                         /opt/my python/bin/python3.12
7f000000-7f100000 r--p 00000000 fe:00 18                         /opt/lib/libpython3.12.so.1.0
7f200000-7f300000 rw-p 00000000 00:00 0
7f300000-7f400000 rw-p 00000000 00:00 0                          [heap]
7f400000-7f500000 r--p 00000000 fe:00 19                         /opt/lib/libc.so.6
nonsense
";
        let mapped = |path: &str, address| Mapped { path: path.to_owned(), address, offset: 0 };
        let found = candidates(maps, "/opt/my python/bin/python3.12");
        assert_eq!(
            found,
            [
                mapped("/opt/lib/libpython3.12.so.1.0", 0x7f00_0000),
                mapped("/opt/my python/bin/python3.12", 0x55d0_c000)
            ]
        );
        assert_eq!(version_of(&found[0].path), Some(Version { major: 3, minor: 12 }));
        assert_eq!(version_of("/usr/bin/python3"), None);
    }
}
