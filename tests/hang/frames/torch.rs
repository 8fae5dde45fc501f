//! Frames of processes that use torch: a data worker, and ranks that wait for one another.

use elastic_rs::hang::frames::Peer;

use super::{Stands, functions, pythons};

#[test]
fn a_data_worker_is_read() {
    let stands = Stands::new(&pythons()[0], "with_torch.py", "loader");
    let line = stands.line("loads");
    let stacks = stands.stacks_when(|stacks| {
        stacks.main().is_some_and(|main| main.frames.first().is_some_and(|frame| frame.line == line))
    });
    let main = stacks.main().unwrap();
    assert_eq!(main.frames[0].function, "Shards.__getitem__");
    assert!(main.frames.iter().any(|frame| frame.function == "_worker_loop" && frame.file.contains("/torch/")));
    assert_eq!(*functions(main).last().unwrap(), "<module>");
}

#[test]
fn the_peer_of_a_blocked_recv_is_known() {
    for (how, peer) in [("recv", Peer::Rank(1)), ("recv-in-group", Peer::GroupRank(1))] {
        let stands = Stands::new(&pythons()[0], "with_torch.py", how);
        let stacks = stands.stacks_when(|stacks| {
            stacks.main().is_some_and(|main| main.frames.first().is_some_and(|frame| frame.function == "recv"))
        });
        assert_eq!(stacks.main().unwrap().frames[0].peer, Some(peer), "{how}");
    }
}
