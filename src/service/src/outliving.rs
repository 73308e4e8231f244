//! Work that goes on to its end when nobody waits for it any more.
//!
//! Driven where it is awaited, so that the ordinary case costs no task, no wake-up and no other thread; given to a task of
//! its own only when the one who waits is dropped in the middle of it.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

/// A future that outlives whoever awaits it.
pub struct Outliving<F: Future<Output: Send> + Send + 'static> {
    work: Option<Pin<Box<F>>>,
    is_begun: bool,
}

impl<F: Future<Output: Send> + Send + 'static> Outliving<F> {
    /// Nothing of `work` happens before this is first awaited.
    pub fn new(work: F) -> Self {
        Self {
            work: Some(Box::pin(work)),
            is_begun: false,
        }
    }
}

impl<F: Future<Output: Send> + Send + 'static> Future for Outliving<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.is_begun = true;
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let polled = work.as_mut().poll(context);
        if polled.is_ready() {
            self.work = None;
        }
        polled
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Outliving<F> {
    fn drop(&mut self) {
        // Without a runtime the process is at its end.
        if let Some(work) = self.work.take().filter(|_| self.is_begun)
            && let Ok(runtime) = Handle::try_current()
        {
            drop(runtime.spawn(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::{sleep, timeout};

    use super::*;

    async fn told_after_10_ms(told: oneshot::Sender<()>) -> u8 {
        sleep(Duration::from_millis(10)).await;
        told.send(()).unwrap();
        7
    }

    #[tokio::test(start_paused = true)]
    async fn it_gives_its_value_to_who_waits() {
        let (told, heard) = oneshot::channel();
        assert_eq!(Outliving::new(told_after_10_ms(told)).await, 7);
        heard.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_when_who_waits_is_gone() {
        let (told, heard) = oneshot::channel();
        let waiting = timeout(Duration::from_millis(1), Outliving::new(told_after_10_ms(told)));
        waiting.await.unwrap_err();
        timeout(Duration::from_secs(1), heard).await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_never_begun_never_happens() {
        let (told, heard) = oneshot::channel();
        drop(Outliving::new(told_after_10_ms(told)));
        timeout(Duration::from_secs(1), heard).await.unwrap().unwrap_err();
    }
}
