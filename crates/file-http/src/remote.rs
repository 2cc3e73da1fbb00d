//! Fetches parts of the file from its server, with retries until a time limit.

use crate::answer::{Meaning, Pin};
use crate::client::{Answer, Client, Failure};
use crate::secrets::Secrets;
use crate::url::{HttpUrl, redirected};
use block::LogLimit;
use bytes::Bytes;
use hyper::Uri;
use memory::to_usize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep};

/// The most requests that the server has at once, for each file.
const REQUESTS_MAX: usize = 8;
const REDIRECTS_MAX: usize = 10;
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest time that an opening waits for a server.
const OPEN_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Remote {
    url: HttpUrl,
    client: Client,
    secrets: Secrets,
    /// The address behind redirects; `None` before the first request.
    place: Mutex<Option<Uri>>,
    requests: Semaphore,
    /// The server does not answer, and the log says so.
    is_out: AtomicBool,
    /// The server was given up, and the log says so.
    has_failed: AtomicBool,
    /// The file has changed: nothing more is read.
    has_changed: AtomicBool,
    times: Times,
}

/// Limits for messages, which keep the log short if the server comes and goes.
#[derive(Debug, Default)]
struct Times {
    out: LogLimit,
    back: LogLimit,
    failed: LogLimit,
}

impl Remote {
    pub(crate) fn new(url: HttpUrl, client: Client, secrets: Secrets) -> Self {
        let (place, requests) = (Mutex::default(), Semaphore::new(REQUESTS_MAX));
        let [is_out, has_failed, has_changed] = [const { AtomicBool::new(false) }; 3];
        Self { url, client, secrets, place, requests, is_out, has_failed, has_changed, times: Times::default() }
    }

    pub(crate) fn url(&self) -> &HttpUrl {
        &self.url
    }

    pub(crate) fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed)
    }

    /// Finds the file and returns its version.
    pub(crate) async fn pin(&self) -> Result<Pin, String> {
        let mut tries = Tries::new(self.url.options.retry.min(OPEN_MAX));
        loop {
            match self.find().await {
                Ok((place, pin)) => {
                    *self.place.lock().await = Some(place);
                    return Ok(pin);
                }
                Err(failure) => tries.wait(self, failure).await?,
            }
        }
    }

    /// Fetches bytes of the pinned version. Errors have been logged.
    pub(crate) async fn part(&self, range: Range<u64>, pin: &Pin) -> Result<Bytes, ()> {
        let Ok(_permit) = self.requests.acquire().await else { return Err(()) };
        let mut tries = Tries::new(self.url.options.retry);
        loop {
            let failure = match self.ask(range.clone(), pin).await {
                Ok(bytes) => {
                    self.has_failed.store(false, Ordering::Relaxed);
                    if self.is_out.swap(false, Ordering::Relaxed)
                        && let Some(times) = self.times.back.admit()
                    {
                        tracing::info!(times, "'{}': the server answers again", self.url);
                    }
                    return Ok(bytes);
                }
                Err(failure) => failure,
            };
            if let Err(why) = tries.wait(self, failure).await {
                if !self.has_failed.swap(true, Ordering::Relaxed)
                    && let Some(times) = self.times.failed.admit()
                {
                    tracing::error!(times, "'{}': {why}: reads fail", self.url);
                }
                return Err(());
            }
        }
    }

    /// Follows redirects to the file; returns its address and version.
    async fn find(&self) -> Result<(Uri, Pin), Failure> {
        let mut place = self.url.uri.clone();
        for _ in 0..=REDIRECTS_MAX {
            let answer = self.client.ask(&place, &(0..1), self.secrets.for_uri(&place)).await?;
            match &answer.meaning {
                Meaning::Part { first: 0, last: 0, pin } => {
                    let pin = pin.clone();
                    answer.bytes(1).await?;
                    return Ok((place, pin));
                }
                Meaning::Empty { pin } => return Ok((place, pin.clone())),
                Meaning::Elsewhere(location) => {
                    place = redirected(&place, location).ok_or_else(|| {
                        Failure::ForGood("the server leads to what is no file on the web, or out of TLS".into())
                    })?;
                }
                _ => return Err(refused(&answer)),
            }
        }
        Err(Failure::ForGood(format!("the server leads elsewhere more than {REDIRECTS_MAX} times")))
    }

    async fn ask(&self, range: Range<u64>, pin: &Pin) -> Result<Bytes, Failure> {
        let known = self.place.lock().await.clone();
        if let Some(place) = known.filter(|_| !self.has_changed()) {
            let answer = self.client.ask(&place, &range, self.secrets.for_uri(&place)).await?;
            let was_moved = place != self.url.uri;
            // The address that a redirect names may expire after some minutes.
            if !(was_moved && matches!(answer.meaning, Meaning::Refused(_) | Meaning::Elsewhere(_))) {
                return self.read(answer, &range, pin).await;
            }
        }
        let (place, found) = self.find().await?;
        self.compare(&found, pin)?;
        *self.place.lock().await = Some(place.clone());
        let answer = self.client.ask(&place, &range, self.secrets.for_uri(&place)).await?;
        self.read(answer, &range, pin).await
    }

    async fn read(&self, answer: Answer, range: &Range<u64>, pin: &Pin) -> Result<Bytes, Failure> {
        match &answer.meaning {
            Meaning::Part { first, last, pin: found } => {
                self.compare(found, pin)?;
                let (first, last) = (*first, *last);
                if first != range.start || last.checked_add(1) != Some(range.end) {
                    return Err(Failure::ForNow("the server sends another part than it was asked for".into(), None));
                }
                let length = to_usize(range.end.saturating_sub(range.start));
                answer.bytes(length).await
            }
            Meaning::Empty { .. } | Meaning::Outside => Err(self.changed("its length")),
            _ => Err(refused(&answer)),
        }
    }

    fn compare(&self, found: &Pin, pin: &Pin) -> Result<(), Failure> {
        if found.length_bytes != pin.length_bytes {
            return Err(self.changed("its length"));
        }
        if found.version != pin.version {
            return Err(self.changed("its entity tag or date"));
        }
        Ok(())
    }

    fn changed(&self, what: &str) -> Failure {
        self.has_changed.store(true, Ordering::Relaxed);
        let cached = match self.url.options.cache {
            Some(_) => "; #revalidate=on lets an opening begin its cache anew",
            None => "",
        };
        Failure::ForGood(format!("the file has changed at its server ({what}), and two files are not mixed{cached}"))
    }
}

/// The tries of one request.
struct Tries {
    until: Option<Instant>,
    pause: Duration,
}

impl Tries {
    fn new(limit: Duration) -> Self {
        Self { until: Instant::now().checked_add(limit), pause: PAUSE_MIN }
    }

    /// Waits for the next try, or returns the error if there is none. The first wait is logged.
    async fn wait(&mut self, remote: &Remote, failure: Failure) -> Result<(), String> {
        let (why, after) = match failure {
            Failure::ForGood(why) => return Err(why),
            Failure::ForNow(why, after) => (why, after),
        };
        let next = Instant::now().checked_add(after.map_or(self.pause, |after| after.max(self.pause)));
        let Some(next) = next.filter(|next| self.until.is_some_and(|until| *next <= until)) else { return Err(why) };
        if !remote.is_out.swap(true, Ordering::Relaxed)
            && let Some(times) = remote.times.out.admit()
        {
            tracing::warn!(times, "'{}': {why}: asking again", remote.url);
        }
        sleep(next.saturating_duration_since(Instant::now())).await;
        self.pause = self.pause.saturating_mul(2).min(PAUSE_MAX);
        Ok(())
    }
}

/// Returns the failure that an answer other than the wanted part means.
fn refused(answer: &Answer) -> Failure {
    Failure::ForGood(match &answer.meaning {
        Meaning::Later(after) => return Failure::ForNow("the server has no answer for now".into(), *after),
        Meaning::Refused(why) => (*why).to_owned(),
        Meaning::NoParts => "the server sends whole files only: it does not serve ranges, which are needed".to_owned(),
        Meaning::Elsewhere(_) => "the server leads elsewhere".to_owned(),
        Meaning::Part { .. } | Meaning::Empty { .. } | Meaning::Outside => "the server sends another part".to_owned(),
    })
}
