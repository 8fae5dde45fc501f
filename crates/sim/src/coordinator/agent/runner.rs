//! The part of our agent's driver: passes events between session, machine and workers. Part of [`super`].

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::event::Event;
use super::super::host::{Agent, Exit, Host, Process};
use super::super::simulation::Simulation;
use super::{Ends, Ours, pid_of_workers, worker_count};
use crate::engine::paths::{End, HostId};
use crate::engine::queue::Time;
use crate::worlds::Violation;
use elastic_rs::agent::machine::{LEAVE_LIMIT, LOOK_LIMIT, MESSAGE_LIMIT};
use elastic_rs::agent::news::Seen;
use elastic_rs::agent::{Command, Outcome};
use elastic_rs::rendezvous::messages::message::{Failure, Running};
use elastic_rs::signals::Signal;
use elastic_rs::workers::StopPolicy;

/// Time by which an agent's end may exceed its grace.
const MARGIN: Duration = Duration::from_secs(1);

impl Simulation {
    /// The agent on a host, if it is ours.
    pub(super) fn ours(&mut self, host: HostId) -> Option<(&mut Process, &mut Ours)> {
        // Stored beside the process, so that both can be borrowed at once.
        let host = &mut self.hosts[host];
        host.process.as_mut().zip(host.ours.as_mut())
    }

    /// Pass events between session, agent and workers until there are none.
    pub(in crate::coordinator) fn after_ours(&mut self, host: HostId) -> Result<(), Violation> {
        loop {
            self.receive(host)?;
            let Some((_, ours)) = self.ours(host) else { return Ok(()) };
            let commands = ours.machine.take_commands();
            if commands.is_empty() {
                break;
            }
            for command in commands {
                self.perform(host, command)?;
            }
            self.flush_node(host)?;
        }
        self.arm_agent(host);
        self.arm_guards(host);
        self.check_reported(host, MESSAGE_LIMIT)?;
        self.end_if_over(host)
    }

    /// Pass the session's view to the agent.
    fn receive(&mut self, host: HostId) -> Result<(), Violation> {
        let (instant, at) = (self.instant(), self.now());
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        let view = process.machine.view().clone();
        if let Some(until) = ours.looking_until {
            let running = process.machine.forecast().map(Option::<&Running>::cloned);
            if running.is_some() || until <= at {
                ours.looking_until = None;
                ours.machine.on_forecast(running.flatten().as_ref(), instant);
            }
        }
        if view.checks_asked != ours.checks_asked {
            ours.checks_asked = view.checks_asked;
            self.check_health(host);
        }
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        if let Some(outcome) = process.machine.take_outcome() {
            process.answers += 1;
            match outcome.clone() {
                Ok(placement) => {
                    if let Some(reason) = process.machine.take_lost_survivors() {
                        ours.machine.on_survivors_lost(&reason);
                    }
                    ours.listening = None;
                    ours.seen = Some(Seen::placed(&placement));
                    ours.machine.on_placed(placement.clone(), instant);
                    self.hosts[host].placements.push(placement);
                    self.check_placed(host)?;
                }
                Err(error) => ours.machine.on_no_placement(error),
            }
            if let Some(process) = &self.hosts[host].process {
                let run = self.options.odd_hosts.run_of(host);
                self.ledgers[run].check_outcome(process, &outcome)?;
            }
        }
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        let now = Seen::of(&view);
        if ours.seen.as_ref().is_some_and(|seen| *seen != now) {
            ours.seen = Some(now);
            ours.machine.on_view(&view, instant);
            ours.need_not_report();
            if view.waiting > 0 && view.reason.is_empty() {
                return Err(Violation::contract(format!("host{host} must re-form without a reason")));
            }
        }
        Ok(())
    }

    /// A worker has ended. If its guard has killed it, that is no failure.
    pub(super) fn receive_fence(&mut self, host: HostId) -> Result<(), Violation> {
        let now = self.instant();
        let Some((process, _)) = self.ours(host) else { return Ok(()) };
        process.machine.fence_if_due(now);
        if process.machine.view().fenced.is_some() { self.receive(host) } else { Ok(()) }
    }

    fn perform(&mut self, host: HostId, command: Command) -> Result<(), Violation> {
        let (now, instant) = (self.now(), self.instant());
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        match command {
            Command::Look => {
                let (pid, until) = (process.pid, now + LOOK_LIMIT);
                ours.looking_until = Some(until);
                self.engine.push(until, Event::AgentTick(host, pid));
            }
            Command::StartAhead(placement) => {
                ours.workers = placement.workers_of(worker_count(host));
                ours.seen = Some(Seen::of(process.machine.view()));
                self.ends.started_ahead += 1;
                self.start_ahead(host);
            }
            Command::CheckHealth => self.check_health(host),
            Command::Join { survival } => {
                process.machine.set_survivors(survival);
                self.ask(host);
            }
            Command::Start { placement, missing } => return self.start_workers(host, *placement, missing),
            Command::Replace { missing, .. } => self.start_ahead_of_round(host, missing),
            Command::StartStandby(_) | Command::Call { .. } => {} // the policy has none
            Command::CancelStart => self.cancel_start(host),
            Command::SendPlacement { local_rank } => return self.send_placement(host, local_rank),
            Command::Send { local_rank, message } => return self.send_to_worker(host, local_rank, *message),
            Command::KillWorker { local_rank } => self.kill_worker(host, local_rank),
            Command::Attending(round) => process.machine.attending(round),
            Command::NoProcessGroup(round) => process.machine.no_process_group(round),
            Command::Saves(round) => process.machine.saves(round),
            Command::Counted { round, count } => process.machine.counted(round, count),
            Command::Parked(round) => process.machine.parked(round),
            Command::WillLeave { round, signal } => {
                if !process.machine.will_leave(round, "a signal", Some(signal)) {
                    ours.machine.on_leave_unanswered();
                }
            }
            Command::Notice { round, left, reason } => {
                process.machine.notice(round, left, &reason, instant);
            }
            Command::Stop(policy) => {
                let mercy = self.options.agents.fences_with_grace && policy.signal == Signal::KILL;
                let policy = if mercy { StopPolicy { signal: Signal::TERM, ..policy } } else { policy };
                let Some((process, _)) = self.ours(host) else { return Ok(()) };
                process.agent = Agent::Stopping { again: true };
                self.begin_stop(host, policy);
            }
            Command::Kill => {
                let now = self.instant();
                let Some(worker_group) = self.hosts[host].worker_group.as_mut() else { return Ok(()) };
                match &mut worker_group.stopping {
                    Some(stopping) => {
                        let commands = stopping.on_kill(now);
                        self.signal_workers(host, commands);
                    }
                    None => self.begin_stop(host, StopPolicy { grace: Duration::ZERO, ..StopPolicy::default() }),
                }
            }
            Command::Listen { local_rank } => self.listen(host, local_rank)?,
            Command::Report(failure) => {
                self.check_report(host, &failure)?;
                let Some((process, ours)) = self.ours(host) else { return Ok(()) };
                process.machine.report_failure(ours.machine.round(), *failure);
            }
            Command::Done(round) => {
                process.machine.report_done(round);
                process.done = true;
                if let Some(worker_group) =
                    self.hosts[host].worker_group.as_ref().filter(|worker_group| !worker_group.left.is_empty())
                {
                    return Err(Violation::contract(format!(
                        "host{host} says that it has finished while {worker_group:?} runs"
                    )));
                }
            }
            Command::Leave { reason, signal } => {
                process.machine.leave(reason, signal);
                self.flush_node(host)?;
                let conn = self.hosts[host].process.as_mut().and_then(|process| process.conn.take());
                if let Some(conn) = conn {
                    self.network.close(conn, End::Node, &mut self.engine);
                }
            }
            Command::Close(verdict) => process.machine.close(verdict),
            Command::Log(text) | Command::Warn(text) => self.engine.remark(|| format!("host{host}: {text}")),
            Command::End(outcome) => {
                ours.ending = Some(*outcome);
                process.agent = Agent::Stopping { again: false };
            }
        }
        Ok(())
    }

    /// Our agent gets a signal, so it has to end in time.
    pub(in crate::coordinator) fn signal_agent(&mut self, host: HostId, signal: i32) -> Result<(), Violation> {
        let (now, instant) = (self.now(), self.instant());
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        ours.signal.get_or_insert(signal);
        ours.need_not_report();
        ours.machine.on_signal(signal, instant);
        let (pid, by) = (process.pid, now + ours.grace + LEAVE_LIMIT.min(ours.grace) + MARGIN);
        self.engine.push(by, Event::MustBeGone(host, pid, now));
        self.after_node(host)
    }

    /// The agent gets a notice. It and its workers are gone when the time is over.
    pub(in crate::coordinator) fn take_away(&mut self, host: HostId, left: Duration) -> Result<(), Violation> {
        let (now, instant) = (self.now(), self.instant());
        let Some((process, ours)) = self.ours(host) else { return Ok(()) };
        ours.need_not_report();
        ours.machine.on_notice(instant + left, "its machine is taken away", instant);
        let pid = process.pid;
        self.engine.processes.note_fault(Some(host), now + left);
        self.engine.push(now + left + MARGIN, Event::MustBeGone(host, pid, now));
        self.after_node(host)
    }

    /// Checks that a signal has ended the agent, unless it stood still meanwhile.
    pub(in crate::coordinator) fn check_gone(&mut self, host: HostId, pid: u64, since: Time) -> Result<(), Violation> {
        let stood_still = self.stalled_until(host) > since;
        match self.process(host, pid) {
            Some(process) if !stood_still => {
                let text = format!("host{host} was to end from {since:?} on, and is still there: {process:?}");
                Err(Violation::contract(text))
            }
            _ => Ok(()),
        }
    }

    pub(in crate::coordinator) fn tick_agent(&mut self, host: HostId, pid: u64) -> Result<(), Violation> {
        let (now, at) = (self.instant(), self.now());
        let Some((_, ours)) = self.ours(host).filter(|(process, _)| process.pid == pid) else { return Ok(()) };
        if ours.alarm.rings(at) {
            ours.machine.on_tick(now);
        }
        self.after_node(host)
    }

    fn arm_agent(&mut self, host: HostId) {
        let Host { process: Some(process), ours: Some(ours), .. } = &mut self.hosts[host] else { return };
        let Some(deadline) = ours.machine.next_deadline() else { return };
        if let Some(at) = ours.alarm.set(self.engine.due(deadline)) {
            self.engine.push(at, Event::AgentTick(host, process.pid));
        }
    }

    /// Ends the agent's process once the agent has ended and nothing is left of its workers.
    fn end_if_over(&mut self, host: HostId) -> Result<(), Violation> {
        if self.hosts[host].worker_group.is_some() {
            return Ok(());
        }
        let Some((_, ours)) = self.ours(host) else { return Ok(()) };
        let Some(outcome) = ours.ending.take() else { return Ok(()) };
        if outcome == Outcome::Succeeded && ours.succeeded < ours.workers {
            let text = format!("host{host} succeeds, of whose {} workers {} did", ours.workers, ours.succeeded);
            return Err(Violation::contract(text));
        }
        if ours.signal.is_some_and(|signal| outcome != Outcome::Signal(signal)) {
            let text = format!("host{host} got signal {:?} and ends as {outcome:?}", ours.signal);
            return Err(Violation::contract(text));
        }
        let cause = match &outcome {
            Outcome::Failed { cause, .. } => Some(cause.as_deref().cloned()),
            Outcome::Unfit { cause, .. } => Some(Some((**cause).clone())),
            _ => None,
        };
        if let Some(cause) = cause {
            self.check_last_message(host, cause.as_ref())?;
        }
        let Some((process, _)) = self.ours(host) else { return Ok(()) };
        let failed_as_reported = match (&outcome, &process.machine.view().closed) {
            (Outcome::Failed { cause, .. }, Some(verdict)) if verdict.is_failure() => Some(cause.clone()),
            _ => None,
        };
        if let Some(cause) = failed_as_reported {
            self.check_cause(host, cause)?;
        }
        self.ends.outcomes.push((host, outcome.clone()));
        self.leave(host, "its work is over", Exit::Agent(outcome))
    }

    /// Checks that all agents of a failed job report the same first cause. Two exceptions: a restarted coordinator may close the job
    /// again, and agents that count for themselves may give up at the same moment, each for its own failure.
    fn check_cause(&mut self, host: HostId, cause: Option<Box<Failure>>) -> Result<(), Violation> {
        let own = cause.as_ref().is_some_and(|cause| cause.pid == pid_of_workers(host));
        if own && self.options.agents.restarts_left.is_some() {
            return Ok(());
        }
        // The words may have become known on its own node only.
        let cause = cause.map(|cause| Box::new(Failure { message: String::new(), ..*cause }));
        let first = self.ends.cause.get_or_insert_with(|| cause.clone());
        if *first != cause && self.coordinator.incarnation == 1 {
            let text = format!("host{host} names the cause {cause:?}, and others {first:?}");
            return Err(Violation::contract(text));
        }
        Ok(())
    }

    /// How our agents ended.
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// The generation that runs on each host, and the number of its workers that are left.
    pub fn workers(&self) -> BTreeMap<HostId, (u64, usize)> {
        let worker_groups =
            self.hosts.iter().enumerate().filter_map(|(number, host)| Some((number, host.worker_group.as_ref()?)));
        worker_groups
            .filter(|(_, worker_group)| worker_group.up)
            .map(|(number, worker_group)| (number, (worker_group.generation, worker_group.left.len())))
            .collect()
    }
}
