//! Where the output of each worker goes: the rules of `DefaultLogsSpecs.reify` in torch's `elastic/multiprocessing/api.py`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::workers::{Copies, Output, StreamsOf};

/// What the command line says of workers' output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Streams that go to files: `--redirects`.
    pub redirects: StreamsOf,
    /// Streams that go to files and to the console: `--tee`.
    pub tee: StreamsOf,
    /// Local ranks that are shown on the console, all if `None`: `--local-ranks-filter`.
    pub shown_local_ranks: Option<BTreeSet<u32>>,
    /// Global ranks that are shown on the console, all if `None`: `--ranks-filter`. A worker may get another rank while it runs, so all
    /// output for consoles passes through the agent then.
    pub shown_ranks: Option<BTreeSet<u32>>,
    /// Texts of lines that are kept apart: `--duplicate-stdout-filters`. None if empty.
    pub stdout_filters: Vec<String>,
    /// The same of standard error.
    pub stderr_filters: Vec<String>,
    /// Of the prefix of teed lines: `--log-line-prefix-template`. Default `[${role_name}${local_rank}]:`.
    pub prefix: Option<String>,
    /// Whether the console gets only whole lines, also of streams that are not teed: a driver puts its own prefix before them.
    pub whole_lines: bool,
}

impl LogOptions {
    /// Whether any output goes to files.
    pub fn fill_files(&self) -> bool {
        self.redirects.any() || self.tee.any()
    }

    /// Where standard output and standard error of the worker of this local and this global rank go; `files` are those in its
    /// folder, if there is one.
    pub fn outputs(
        &self,
        (local_rank, rank): (u32, u32),
        files: Option<(PathBuf, PathBuf)>,
        prefix: &str,
    ) -> (Output, Output) {
        let console = self.shown_ranks.as_ref().is_none_or(|ranks| ranks.contains(&rank));
        let Some((stdout, stderr)) = files else { return (self.console(console), self.console(console)) };
        let (redirected, teed) = (self.redirects.of(local_rank), self.tee.of(local_rank));
        let shown = self.shown_local_ranks.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        let output = |redirected, teed, file| match (teed, redirected, shown) {
            (true, _, true) => Output::Copied(Copies { file: Some(file), console, prefix: Some(prefix.to_owned()) }),
            (true, ..) | (_, true, _) => Output::File(file),
            (false, false, true) => self.console(console),
            (false, false, false) => Output::Null,
        };
        (output(redirected.stdout, teed.stdout, stdout), output(redirected.stderr, teed.stderr, stderr))
    }

    /// The console alone, if the worker's rank is shown there.
    fn console(&self, console: bool) -> Output {
        let ranks = self.shown_ranks.as_ref().map(BTreeSet::len);
        match self.whole_lines || ranks.is_some() {
            // One rank alone may show its bytes as they come.
            true => {
                let whole_lines = self.whole_lines || ranks.is_some_and(|count| count > 1);
                Output::Copied(Copies { file: None, console, prefix: whole_lines.then(String::new) })
            }
            false => Output::Inherit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::text::LOCAL_WORLD_SIZE_LIMIT;

    fn of(options: &LogOptions, local_rank: u32) -> (Output, Output) {
        options.outputs((local_rank, 8 + local_rank), Some(("out".into(), "err".into())), "[p]:")
    }

    #[test]
    fn every_worker_that_a_node_may_have_can_be_named() {
        assert!(format!("{}:1", LOCAL_WORLD_SIZE_LIMIT - 1).parse::<StreamsOf>().is_ok());
        assert!(format!("{LOCAL_WORLD_SIZE_LIMIT}:1").parse::<StreamsOf>().is_err());
    }

    #[test]
    fn what_is_not_asked_for_stays_on_the_console() {
        assert_eq!(of(&LogOptions::default(), 0), (Output::Inherit, Output::Inherit));
    }

    #[test]
    fn files_and_console_are_chosen_by_rank_and_stream() {
        let options = LogOptions {
            redirects: "0:3,1:1".parse().unwrap(),
            tee: "1:2,2:3".parse().unwrap(),
            ..LogOptions::default()
        };
        let file = |name: &str| Output::File(name.into());
        let tee = |name: &str| {
            Output::Copied(Copies { file: Some(name.into()), console: true, prefix: Some("[p]:".to_owned()) })
        };
        assert_eq!(of(&options, 0), (file("out"), file("err")));
        assert_eq!(of(&options, 1), (file("out"), tee("err")));
        assert_eq!(of(&options, 2), (tee("out"), tee("err")));
        assert_eq!(of(&options, 3), (Output::Inherit, Output::Inherit));
    }

    #[test]
    fn ranks_that_are_not_shown_keep_their_files() {
        let options =
            LogOptions { tee: "0:1".parse().unwrap(), shown_local_ranks: Some([1].into()), ..LogOptions::default() };
        assert_eq!(of(&options, 0), (Output::File("out".into()), Output::Null));
        assert_eq!(of(&options, 1), (Output::Inherit, Output::Inherit));
    }

    #[test]
    fn for_a_driver_workers_that_share_the_console_write_whole_lines() {
        let options = LogOptions { whole_lines: true, redirects: "1:3".parse().unwrap(), ..LogOptions::default() };
        let lines = Output::Copied(Copies { file: None, console: true, prefix: Some(String::new()) });
        assert_eq!(of(&options, 0), (lines.clone(), lines.clone()));
        assert_eq!(of(&options, 1), (Output::File("out".into()), Output::File("err".into())));
        assert_eq!(options.outputs((0, 8), None, "[p]:"), (lines.clone(), lines));
    }

    #[test]
    fn global_ranks_that_are_not_shown_pass_through_the_agent_all_the_same() {
        let copied = |file: Option<&str>, console, prefix: Option<&str>| {
            let (file, prefix) = (file.map(Into::into), prefix.map(str::to_owned));
            Output::Copied(Copies { file, console, prefix })
        };
        let options =
            LogOptions { shown_ranks: Some([9].into()), tee: "0:1,1:1".parse().unwrap(), ..LogOptions::default() };
        assert_eq!(of(&options, 0), (copied(Some("out"), false, Some("[p]:")), copied(None, false, None)));
        assert_eq!(of(&options, 1), (copied(Some("out"), true, Some("[p]:")), copied(None, true, None)));
        assert_eq!(options.outputs((0, 8), None, ""), (copied(None, false, None), copied(None, false, None)));
        for lines in [
            LogOptions { whole_lines: true, ..options.clone() },
            LogOptions { shown_ranks: Some([8, 9].into()), ..options.clone() },
        ] {
            assert_eq!(of(&lines, 2).1, copied(None, false, Some("")), "several workers share the console");
        }
        let both = LogOptions { shown_local_ranks: Some([0].into()), tee: "0".parse().unwrap(), ..options };
        assert_eq!(of(&both, 1).0, Output::Null, "its local rank is never shown");
    }

    #[test]
    fn without_a_folder_everything_is_on_the_console() {
        let options =
            LogOptions { tee: "3".parse().unwrap(), shown_local_ranks: Some([1].into()), ..LogOptions::default() };
        assert_eq!(options.outputs((0, 8), None, "[p]:"), (Output::Inherit, Output::Inherit));
    }
}
