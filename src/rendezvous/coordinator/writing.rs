//! Writing to the connections of a coordinator.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::rendezvous::messages::codec;
use crate::rendezvous::messages::message::CoordinatorMessage;
use crate::secure::Writer;

/// Time for all messages of an ended session to be written.
pub(super) const FAREWELL: Duration = Duration::from_secs(5);
/// Time for a single message to be written while the session lives. A slow node may take long.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// The task that writes to a node. Once it ends, the one that reads from the node ends too.
pub(super) struct Writing {
    outbox: mpsc::Sender<BytesMut>,
    /// Dropped with `outbox` when the session ends.
    _open: oneshot::Sender<Infallible>,
    task: AbortHandle,
}

impl Writing {
    pub fn new(outbox: mpsc::Sender<BytesMut>, open: oneshot::Sender<Infallible>, task: AbortHandle) -> Self {
        Self { outbox, _open: open, task }
    }

    /// Queue a message, or end the connection at once. The error is the reason, unless the connection has ended already.
    pub fn queue(&self, message: &CoordinatorMessage) -> Result<(), Option<String>> {
        let mut frame = BytesMut::new();
        let queued = match codec::try_encode_frame(message, &mut frame) {
            Ok(()) => self.outbox.try_send(frame).map_err(|unsent| match unsent {
                TrySendError::Full(_) => Some("a node does not read its messages".to_owned()),
                TrySendError::Closed(_) => None,
            }),
            Err(error) => Err(Some(format!("a message to a node cannot be sent, which is a bug ({error})"))),
        };
        queued.inspect_err(|_| self.task.abort())
    }
}

/// Tell a peer why it is sent away.
pub(super) async fn refuse(writer: &mut Writer, reason: String) {
    tell(writer, &CoordinatorMessage::Rejected { reason }).await;
}

/// Send a peer this, if it reads.
pub(super) async fn tell(writer: &mut Writer, message: &CoordinatorMessage) {
    let mut frame = BytesMut::new();
    if codec::try_encode_frame(message, &mut frame).is_ok() {
        let _ = timeout(FAREWELL, send(writer, &frame)).await;
    }
}

/// Write these bytes.
pub(super) async fn send(writer: &mut Writer, frame: &[u8]) -> io::Result<()> {
    writer.write_all(frame).await?;
    writer.flush().await
}

/// Write until the outbox is closed and empty, or the connection fails. Once the session has `ended`, for [`FAREWELL`] at most.
pub(super) async fn write(
    mut writer: Writer,
    mut outgoing: mpsc::Receiver<BytesMut>,
    ended: oneshot::Receiver<Infallible>,
) {
    let all = async {
        while let Some(frame) = outgoing.recv().await {
            if !matches!(timeout(PATIENCE, send(&mut writer, &frame)).await, Ok(Ok(()))) {
                return;
            }
        }
        // TLS sends a goodbye, which a peer that reads nothing could hold up.
        let _ = timeout(FAREWELL, writer.shutdown()).await;
    };
    let mut all = pin!(all);
    tokio::select! {
        () = &mut all => {}
        _ = ended => drop(timeout(FAREWELL, all).await),
    }
}
