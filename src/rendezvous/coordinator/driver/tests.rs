use super::*;

/// No bound on a reason is known to be missed, so the test makes the message itself.
#[tokio::test]
async fn a_message_that_fits_no_frame_costs_its_own_session() {
    let log = BoundedLog::new(Duration::from_secs(60), |_, _| {});
    let (mut machine, mut sessions) = (Machine::new(), Sessions::new());
    let mut outboxes = Vec::new();
    for number in 1..=2 {
        let (outbox, outgoing) = mpsc::channel(UNREAD_LIMIT);
        let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
        sessions.insert(SessionId(number), Writing { outbox, _open: oneshot::channel().0, task });
        outboxes.push(outgoing);
    }
    let rejected = |bytes| CoordinatorMessage::Rejected { reason: "x".repeat(bytes) };
    let long = codec::FRAME_LIMIT_BYTES + 1;
    send_to(SessionId(1), &rejected(long), &mut sessions, &mut machine, &log);
    send_to(SessionId(2), &rejected(5), &mut sessions, &mut machine, &log);
    assert_eq!(sessions.keys().collect::<Vec<_>>(), [&SessionId(2)]);
    assert_eq!(outboxes[0].recv().await, None);
    assert!(outboxes[1].recv().await.is_some(), "the others are served");
}
