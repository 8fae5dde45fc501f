//! `$name` and `${name}` in texts, as Python's `string.Template.safe_substitute` replaces them: torchrun does so with workers'
//! arguments and with the prefixes of their lines.

/// Replaces the names that `value` knows, and leaves the others as they are. `$$` becomes `$`; any other `$` stays.
pub fn substitute(text: &[u8], value: impl Fn(&str) -> Option<String>) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = memchr::memchr(b'$', rest) {
        out.extend_from_slice(&rest[..at]);
        let found = &rest[at..];
        if found.starts_with(b"$$") {
            out.push(b'$');
            rest = &found[2..];
            continue;
        }
        let (name, length) = reference(found);
        match name.and_then(&value) {
            Some(value) => out.extend_from_slice(value.as_bytes()),
            None => out.extend_from_slice(&found[..length]),
        }
        rest = &found[length..];
    }
    out.extend_from_slice(rest);
    out
}

/// The name that a text beginning with `$` refers to, and how long the reference is.
fn reference(text: &[u8]) -> (Option<&str>, usize) {
    let (begin, end) = if text.get(1) == Some(&b'{') { (2, 1) } else { (1, 0) };
    let named = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let length = text[begin..].iter().take_while(|byte| named(byte)).count();
    let name = &text[begin..begin + length];
    let closed = end == 0 || text.get(begin + length) == Some(&b'}');
    if !closed || name.first().is_none_or(u8::is_ascii_digit) {
        return (None, 1);
    }
    (std::str::from_utf8(name).ok(), begin + length + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_as_python_does() {
        // Each right side is what `string.Template(left).safe_substitute(local_rank=3, rank=7)` gives.
        for (template, expected) in [
            ("--device=${local_rank}", "--device=3"),
            ("$local_rank:$rank", "3:7"),
            ("$local_ranks ${local_rank}s", "$local_ranks 3s"),
            ("$$local_rank costs $5", "$local_rank costs $5"),
            ("$LOCAL_RANK ${other} $", "$LOCAL_RANK ${other} $"),
            ("${local_rank ${rank}", "${local_rank 7"),
            ("${} ${1a} $é", "${} ${1a} $é"),
            ("$$$rank", "$7"),
            ("", ""),
        ] {
            let known = |name: &str| match name {
                "local_rank" => Some("3".to_owned()),
                "rank" => Some("7".to_owned()),
                _ => None,
            };
            let replaced = substitute(template.as_bytes(), known);
            assert_eq!(String::from_utf8(replaced).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn arguments_need_not_be_utf_8() {
        assert_eq!(substitute(b"\xff$rank\xfe", |_| Some("1".to_owned())), b"\xff1\xfe");
    }
}
