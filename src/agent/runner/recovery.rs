//! The line about a recovery, once it is known what it has cost. Part of [`super`].

use std::future::pending;
use std::time::{Duration, Instant};

use super::Runner;
use crate::agent::command::Command;
use crate::agent::recovered::Recovered;
use crate::rendezvous::node::session::Session;

/// How long the log line of a recovery waits for the end of the workers' imports. Programs that never connect to the store have no
/// such end.
pub(super) const IMPORT_LIMIT: Duration = Duration::from_secs(60);

/// A recovery that has not been logged yet.
#[derive(Debug)]
pub(super) struct PendingRecovery {
    recovered: Recovered,
    until: Instant,
}

impl PendingRecovery {
    /// When to log it at the latest.
    pub fn until(&self) -> Instant {
        self.until
    }
}

impl Runner {
    /// The workers run again. Where their store is, it is known when their imports end, so the line waits for it.
    pub(super) fn on_recovered(&mut self, recovered: Recovered) {
        let knows_imports = self.session.is_some() && self.placement().is_some_and(|assignment| assignment.rank == 0);
        self.pending_recovery = Some(PendingRecovery { recovered, until: Instant::now() + IMPORT_LIMIT });
        if !knows_imports {
            self.log_recovery(None);
        }
    }

    /// Tell what the last recovery has cost, once. `import`: how long the imports took, if that is known.
    pub(super) fn log_recovery(&mut self, import: Option<Duration>) {
        if let Some(PendingRecovery { recovered, .. }) = self.pending_recovery.take() {
            tracing::info!(target: "elastic_rs::job", "[{}] {}", self.workers.run_id, recovered.line(import));
        }
    }
}

/// Whether something happens that is to be logged after the last recovery.
pub(super) fn is_overtaken_by(command: &Command) -> bool {
    matches!(
        command,
        Command::Stop(_)
            | Command::CheckHealth
            | Command::Join { .. }
            | Command::Done(_)
            | Command::Report(_)
            | Command::Warn(_)
            | Command::End(_)
    )
}

/// Wait until the imports of the round that ended the recovery have ended. Returns how long they took. May be dropped.
pub(super) async fn imported(session: Option<&Session>, pending_recovery: Option<&PendingRecovery>) -> Duration {
    let (Some(session), Some(pending_recovery)) = (session, pending_recovery) else { return pending().await };
    let of_round = |imported: Option<_>| imported.filter(|(round, _)| *round == pending_recovery.recovered.round());
    let view = session.view_when(|view| of_round(view.imported).is_some()).await;
    of_round(view.imported).map_or_else(Duration::default, |(_, import)| import)
}
