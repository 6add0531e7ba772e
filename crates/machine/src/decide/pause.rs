//! Pause and resume: a paused run still decides, but its tasks cannot be claimed.

use super::report::applied;
use super::{Decider, Done};
use crate::record::{ActName, Entry};
use crate::run::Phase;
use crate::transition::Answer;

impl Decider<'_> {
    pub(super) fn pause(&mut self, by: &str) -> Done<Answer> {
        self.set_paused(by, true)
    }

    pub(super) fn resume(&mut self, by: &str) -> Done<Answer> {
        self.set_paused(by, false)
    }

    fn set_paused(&mut self, by: &str, paused: bool) -> Done<Answer> {
        if self.header.phase == Phase::Ended {
            return Ok(Answer::Conflict(format!("the run has ended: {}", self.header.status().as_str())));
        }
        if self.header.paused == paused {
            return Ok(Answer::Nothing);
        }
        self.header.paused = paused;
        let (act, entry) = match paused {
            true => (ActName::Pause, Entry::FlowPaused {}),
            false => (ActName::Resume, Entry::FlowResumed {}),
        };
        self.record(Entry::Act { act, by: by.to_owned(), step_key: None, from: None, reason: None });
        self.record(entry);
        applied()
    }
}
