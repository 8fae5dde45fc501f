//! The page of a run, for browsers: asked for here, and made elsewhere.
//!
//! A page is made of events by whoever has taken the [`PageRequests`] of an endpoint server: in this package a thread of Python's, which the coordinator's
//! thread never waits for. One page is made at a time, and whoever asks for it within a second gets the same one. So a hundred open
//! browsers cost as much as one, and readers can hold up nobody but each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::rendezvous::coordinator::driver::{Question, Subject};

/// Requests that wait for a page. More get 503 and `Retry-After`.
const WAITING: usize = 32;
/// A page is shown for so long.
const FRESH: Duration = Duration::from_secs(1);
/// Pages that are kept: runs that are looked at in turn.
const KEPT: usize = 8;
/// Time for a page to be made. Python may be busy.
const MAKING: Duration = Duration::from_secs(30);
/// Time for which a request waits.
const PATIENCE: Duration = Duration::from_secs(4);

/// A page that somebody waits for.
#[derive(Debug)]
pub struct PageRequest {
    /// What it shows.
    pub subject: Subject,
    /// Which page was asked for.
    pub which: Which,
    /// Where the HTML goes. Dropped: it could not be made.
    pub reply: oneshot::Sender<String>,
}

/// The requests of an endpoint server, for the one who makes its pages.
pub type PageRequests = mpsc::Receiver<PageRequest>;

/// Which page is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Which {
    /// The run. `None`: the only one, or a list.
    pub run: Option<String>,
    /// It does not ask for itself again.
    pub still: bool,
}

/// Why there is no page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoPage {
    /// Nobody makes pages here.
    Nobody,
    /// There is nothing to be shown: why not.
    Nothing(String),
    /// Others wait already, or it takes too long.
    Busy,
    /// It could not be made.
    Failed,
}

type Answer = Result<Arc<str>, NoPage>;

/// A request for a page.
#[derive(Debug)]
struct Asked {
    which: Which,
    reply: oneshot::Sender<Answer>,
}

/// Where pages are asked for.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    asked: mpsc::Sender<Asked>,
    made: Arc<AtomicBool>,
}

/// What keeps pages for a second, and asks for those that it has not.
#[derive(Debug)]
pub(super) struct PageCache {
    asked: mpsc::Receiver<Asked>,
    requests: mpsc::Sender<PageRequest>,
    questions: mpsc::Sender<Question>,
    kept: VecDeque<(Which, Instant, Answer)>,
}

/// The requests for pages, until somebody takes them to make the pages.
#[derive(Debug)]
pub(super) struct PageOffer {
    requests: Option<PageRequests>,
    made: Arc<AtomicBool>,
}

impl PageOffer {
    /// The requests, for one who makes pages from now on. `None`: they were taken before, or nobody may read a page.
    pub fn take(&mut self) -> Option<PageRequests> {
        let requests = self.requests.take();
        self.made.fetch_or(requests.is_some(), Ordering::Relaxed);
        requests
    }
}

/// The parts of an endpoint server that have to do with pages. `shown`: somebody may read them.
pub(super) fn pages(questions: mpsc::Sender<Question>, shown: bool) -> (Pages, PageCache, PageOffer) {
    let (to_cache, asked) = mpsc::channel(WAITING);
    let (to_maker, requests) = mpsc::channel(1);
    let made = Arc::new(AtomicBool::new(false));
    (
        Pages { asked: to_cache, made: Arc::clone(&made) },
        PageCache { asked, requests: to_maker, questions, kept: VecDeque::new() },
        PageOffer { requests: shown.then_some(requests), made },
    )
}

impl Pages {
    /// The page that is asked for, once it is made.
    pub async fn of(&self, which: Which) -> Answer {
        if !self.made.load(Ordering::Relaxed) {
            return Err(NoPage::Nobody);
        }
        let (reply, answer) = oneshot::channel();
        self.asked.try_send(Asked { which, reply }).map_err(|_| NoPage::Busy)?;
        match timeout(PATIENCE, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(NoPage::Failed),
            Err(_) => Err(NoPage::Busy),
        }
    }
}

impl PageCache {
    /// Answer one request after the other, until nobody can ask any more.
    pub async fn serve(mut self) {
        while let Some(Asked { which, reply }) = self.asked.recv().await {
            if reply.is_closed() {
                continue; // who has asked has gone
            }
            let answer = match self.kept(&which) {
                Some(answer) => answer,
                None => {
                    let answer = self.make(&which).await;
                    self.keep(which, answer.clone());
                    answer
                }
            };
            let _ = reply.send(answer);
        }
    }

    fn kept(&self, which: &Which) -> Option<Answer> {
        let (_, since, answer) = self.kept.iter().find(|(of, ..)| of == which)?;
        (since.elapsed() < FRESH).then(|| answer.clone())
    }

    fn keep(&mut self, which: Which, answer: Answer) {
        self.kept.retain(|(of, ..)| *of != which);
        if !matches!(answer, Err(NoPage::Nothing(_))) {
            self.kept.truncate(KEPT - 1);
            self.kept.push_front((which, Instant::now(), answer));
        }
    }

    async fn make(&self, which: &Which) -> Answer {
        let (reply, answer) = oneshot::channel();
        let question = Question::Page { run: which.run.clone(), reply };
        self.questions.send(question).await.map_err(|_| NoPage::Failed)?;
        let subject = answer.await.map_err(|_| NoPage::Failed)?.map_err(NoPage::Nothing)?;
        let which = which.clone();
        let (reply, html) = oneshot::channel();
        let made = timeout(MAKING, async {
            self.requests.send(PageRequest { subject, which, reply }).await.ok()?;
            html.await.ok()
        });
        match made.await {
            Ok(Some(html)) => Ok(html.into()),
            Ok(None) => Err(NoPage::Failed),
            Err(_) => Err(NoPage::Busy),
        }
    }
}
