//! Which releases of etcd have bugs that a rendezvous can meet. Pure. From the change logs in etcd's repository.

/// A bug, and the first releases without it, by minor version. Minor versions after the last one listed never had it.
struct Bug {
    what: &'static str,
    mended: &'static [(u32, u32, u32)],
}

const BUGS: &[Bug] = &[
    Bug { what: "reads may be stale after a member was paused", mended: &[(3, 4, 42), (3, 5, 28), (3, 6, 9)] },
    Bug { what: "a revoked lease may be reported as renewed", mended: &[(3, 4, 38), (3, 5, 23), (3, 6, 5)] },
    Bug {
        what: "an old leader may revoke leases that hold, and a watch may lose events after a compaction",
        mended: &[(3, 4, 31), (3, 5, 13)],
    },
    Bug { what: "a watch may report progress before its events", mended: &[(3, 4, 25), (3, 5, 8)] },
];

/// The first version with the v3 API in the form that is needed (watch progress on request, learners).
const FIRST: (u32, u32) = (3, 4);
/// Minor versions up to this one get no releases any more.
const ENDED: (u32, u32) = (3, 4);

/// What is known to be wrong with a version of etcd, each as a sentence without its final stop. Empty for a good one.
///
/// A pre-release counts as its release. A version that cannot be read has nothing known.
pub fn known_problems(version: &str) -> Vec<String> {
    let Some((major, minor, patch)) = parse(version) else { return Vec::new() };
    if (major, minor) < FIRST {
        return vec![format!("etcd {version} is older than 3.4, the first version that can be used")];
    }
    let mut problems: Vec<_> = BUGS
        .iter()
        .filter_map(|bug| {
            let (_, _, good) = bug.mended.iter().find(|mended| (mended.0, mended.1) == (major, minor))?;
            (patch < *good).then(|| format!("{} (mended in {major}.{minor}.{good})", bug.what))
        })
        .collect();
    if (major, minor) <= ENDED {
        problems.push(format!("etcd {major}.{minor} gets no releases any more"));
    }
    problems
}

/// `3.5.1`, `3.6.0-rc.2` or `3.5.1+git` as numbers.
fn parse(version: &str) -> Option<(u32, u32, u32)> {
    let release = version.trim_start_matches('v').split(['-', '+']).next()?;
    let mut numbers = release.split('.').map(|number| number.parse().ok());
    let parsed = (numbers.next()??, numbers.next()??, numbers.next()??);
    numbers.next().is_none().then_some(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_with_known_bugs_are_named() {
        let counts = [
            ("3.6.9", 0),
            ("3.6.8", 1),
            ("3.6.0-rc.2", 2),
            ("3.5.28", 0),
            ("3.5.27", 1),
            ("3.5.1", 4),
            ("3.7.0", 0),
            ("3.4.45", 1),
            ("3.4.23", 5),
            ("3.3.9", 1),
            ("unknown", 0),
            ("3.5", 0),
            ("3.5.1.2", 0),
        ];
        for (version, count) in counts {
            assert_eq!(known_problems(version).len(), count, "{version}: {:?}", known_problems(version));
        }
        let problems = known_problems("3.5.27");
        assert_eq!(problems, ["reads may be stale after a member was paused (mended in 3.5.28)"]);
    }
}
