//! Where the ranks of a finding stand.

use super::world::World;
use crate::hang::finding::{DETAILS_LIMIT, Finding, Place};
use crate::hang::view::{DataWorker, View, all_users, waits_for_data};

/// Add where the first ranks of a finding stand, and where the others do.
pub(super) fn add(world: &World<'_>, finding: &mut Finding) {
    let places = finding.ranks.iter().filter_map(|rank| world.view(rank));
    finding.places = places.take(DETAILS_LIMIT).map(place).collect();
    finding.others = finding.waiting.first().and_then(|rank| world.view(rank)).map(place);
}

fn place(view: &View) -> Place {
    let worker = busy_data_worker(view);
    let frames = match worker {
        Some(worker) if !worker.frames.is_empty() => &worker.frames,
        _ => &view.frames,
    };
    Place {
        rank: view.rank,
        pid: view.pid,
        life: view.life,
        class: view.class,
        gil: view.gil,
        call: view.call.clone(),
        data_worker: worker.map(|worker| worker.pid),
        data_worker_stopped: worker.is_some_and(|worker| worker.state.is_stopped()),
        frames: all_users(frames).into_iter().take(DETAILS_LIMIT).cloned().collect(),
    }
}

/// Of a rank that waits for data, the data worker that does not wait for work: first of all one that is stopped.
fn busy_data_worker(view: &View) -> Option<&DataWorker> {
    let busy = view.data_workers.iter().filter(|worker| !worker.is_idle());
    waits_for_data(&view.frames).then_some(())?;
    busy.min_by_key(|worker| (!worker.state.is_stopped(), worker.pid))
}
