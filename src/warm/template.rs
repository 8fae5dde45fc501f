//! The agent's end of a fork server.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::client::Client;
use super::spec::TemplateSpec;
use super::supervisor::Supervisor;
use crate::workers::{Forker, WorkerSpec};

/// The agent's handle of a fork server, which users know as a template.
///
/// Dropping it ends the server and kills the workers that were forked from it, a moment later. To know when, use
/// [`end`](Self::end).
#[derive(Debug)]
pub struct Template {
    client: Arc<Client>,
    /// Closing the channel ends the supervisor.
    supervisor: Mutex<Option<(watch::Sender<()>, JoinHandle<()>)>>,
}

impl Template {
    /// Starts the fork server, and returns at once. Needs a tokio runtime with I/O and time.
    pub fn start(spec: TemplateSpec) -> Template {
        let (closing, closed) = watch::channel(());
        let client = Arc::new(Client::new(spec));
        let supervisor = tokio::spawn(Supervisor::new(client.clone(), closed).run());
        Template { client, supervisor: Mutex::new(Some((closing, supervisor))) }
    }

    /// Ends the fork server, kills the workers that were forked from it, and waits until no process of them is left.
    pub async fn end(&self) {
        let Some((closing, supervisor)) = self.supervisor.lock().take() else { return };
        drop(closing);
        if let Err(error) = supervisor.await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
    }

    /// Waits while the fork server imports its modules, up to a minute from its start.
    pub async fn ready(&self) {
        self.client.ready().await;
    }

    /// Waits while the fork server imports the modules of these workers, up to a minute from its start. Executed workers would
    /// import them too, and be ready later.
    pub async fn loaded(&self, specs: &[WorkerSpec]) {
        self.client.loaded(specs).await;
    }

    /// The handle by which a group has its workers forked. It does not wait until the fork server has [`loaded`](Self::loaded).
    pub fn forker(&self) -> Forker {
        Forker::new(self.client.clone())
    }
}
