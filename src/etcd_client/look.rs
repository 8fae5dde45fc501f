//! A look at all members, for the doctor.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::client::Client;
use super::connection::Connection;
use super::endpoints::to_text;
use super::error::{EtcdError, Failure};
use super::messages::{MemberListRequest, StatusRequest, StatusResponse};
use super::version::known_problems;

/// What a look has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// By endpoint, in the order given: the member there, or why there is none.
    pub endpoints: Vec<(String, Result<MemberLook, EtcdError>)>,
    /// The members that the cluster lists, by the first one that answered.
    pub members: Vec<ListedMember>,
}

/// A member that answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberLook {
    /// Its id.
    pub id: u64,
    /// Its name. Empty if it is not among those listed.
    pub name: String,
    /// Its version, such as `3.5.28`.
    pub version: String,
    /// What is known to be wrong with this version.
    pub problems: Vec<String>,
    /// The leader's id. 0: it knows none.
    pub leader: u64,
    /// Whether it only learns, and serves nobody.
    pub is_learner: bool,
    /// Alarms that it has raised: `NOSPACE`, `CORRUPT`.
    pub alarms: Vec<String>,
    /// What it says is wrong with itself.
    pub errors: Vec<String>,
    /// Bytes of its database, and of what is in use there.
    pub db_size: (u64, u64),
    /// Time from a question to its answer.
    pub round_trip: Duration,
}

impl MemberLook {
    /// Whether it leads.
    pub fn is_leader(&self) -> bool {
        self.leader != 0 && self.leader == self.id
    }
}

/// A member that the cluster lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedMember {
    /// Its id.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The URLs that it advertises to clients.
    pub client_urls: Vec<String>,
    /// Whether it only learns.
    pub is_learner: bool,
}

/// The answer of one member.
struct Answer {
    look: MemberLook,
    listed: Vec<ListedMember>,
}

impl Client {
    /// Ask each endpoint, all at once, each for at most three times the client's patience.
    pub async fn look(&self) -> Look {
        let members = &self.options().endpoints.members;
        let mut asking = JoinSet::new();
        for index in 0..members.len() {
            let client = self.clone();
            asking.spawn(async move { (index, client.look_at(index).await) });
        }
        let mut answers = asking.join_all().await;
        answers.sort_by_key(|(index, _)| *index);
        let listed = answers.iter().find_map(|(_, answer)| answer.as_ref().ok().map(|answer| answer.listed.clone()));
        let endpoints =
            answers.into_iter().map(|(index, answer)| (to_text(&members[index]), answer.map(|answer| answer.look)));
        Look { endpoints: endpoints.collect(), members: listed.unwrap_or_default() }
    }

    async fn look_at(&self, index: usize) -> Result<Answer, EtcdError> {
        self.ask_one(index).await.map_err(|failure| failure.error)
    }

    async fn ask_one(&self, index: usize) -> Result<Answer, Failure> {
        let patience = self.options().patience;
        let address = &self.options().endpoints.members[index];
        let (connection, status) = Connection::open(address, self.options(), self.0.token.clone()).await?;
        // The doctor reports the rights of its user: so it always authenticates, at each member.
        if self.options().credentials.is_some() {
            self.0.authenticate(&connection, connection.token()).await?;
        } else {
            status?;
        }
        let began = Instant::now();
        let status = connection.call(StatusRequest {}, patience).await?;
        let round_trip = began.elapsed();
        let list = connection.call(MemberListRequest {}, patience).await?;
        let listed: Vec<_> = list
            .members
            .into_iter()
            .map(|member| ListedMember {
                id: member.id,
                name: member.name,
                client_urls: member.client_urls,
                is_learner: member.is_learner,
            })
            .collect();
        let own = status.header.as_ref().map_or(0, |header| header.member_id);
        let name = listed.iter().find(|member| member.id == own).map(|member| member.name.clone());
        Ok(Answer { look: look(own, name.unwrap_or_default(), status, round_trip), listed })
    }
}

fn look(id: u64, name: String, status: StatusResponse, round_trip: Duration) -> MemberLook {
    let bytes = |size: i64| u64::try_from(size).unwrap_or(0);
    let (alarms, errors): (Vec<_>, Vec<_>) = status.errors.into_iter().partition(|error| error.contains("alarm:"));
    MemberLook {
        id,
        name,
        problems: known_problems(&status.version),
        leader: status.leader,
        is_learner: status.is_learner,
        alarms: alarms.iter().filter_map(|alarm| own_alarm(alarm, id)).collect(),
        errors,
        db_size: (bytes(status.db_size), bytes(status.db_size_in_use)),
        version: status.version,
        round_trip,
    }
}

/// The kind of an alarm, such as `memberID:5 alarm:NOSPACE`, if this member has raised it. Each member reports those of all.
fn own_alarm(text: &str, id: u64) -> Option<String> {
    let own = text.split_whitespace().any(|word| word.strip_prefix("memberID:") == Some(id.to_string().as_str()));
    let kind = text.split_whitespace().find_map(|word| word.strip_prefix("alarm:"))?;
    own.then(|| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_is_its_members() {
        assert_eq!(own_alarm("memberID:5 alarm:NOSPACE ", 5), Some("NOSPACE".to_owned()));
        assert_eq!(own_alarm("memberID:5  alarm:CORRUPT", 5), Some("CORRUPT".to_owned()));
        assert_eq!(own_alarm("memberID:51 alarm:NOSPACE", 5), None);
        assert_eq!(own_alarm("memberID:5", 5), None);
    }
}
