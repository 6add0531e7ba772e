//! Follows a run: redraws it in place on a terminal, otherwise prints record after record.

use std::io::Write;
use std::time::Duration;

use eddyline_protocol::{RunInfo, StepInfo};
use serde_json::Value;
use tokio::time::Instant;

use super::timeline::{self, PATIENCE, Timeline, patiently};
use super::tree::{Glance, draw};
use crate::Context;
use crate::connect::{Remote, segment, understood};
use crate::moment;
use crate::screen::{Line, Screen};
use crate::trouble::{Exit, Trouble};

/// How often the picture is redrawn while nothing happens, to update its durations.
const TICK: Duration = Duration::from_millis(500);
/// The least time between two reads of all steps: a busy run must not be read with every record.
const GAP: Duration = Duration::from_millis(100);

/// A run at one point in time.
#[derive(Debug)]
pub struct Moment {
    pub run: RunInfo,
    /// Why it was cancelled, if a reason was given.
    pub reason: Option<String>,
    pub steps: Vec<StepInfo>,
    pub order: Vec<String>,
}

impl Moment {
    pub async fn read(remote: &Remote, run: &str) -> Result<Moment, Trouble> {
        let info: Value = remote.get(&format!("/v1/runs/{}", segment(run)), &[]).await?;
        let reason = info["reason"].as_str().map(str::to_owned);
        let mut moment = Moment { run: understood(info)?, reason, steps: Vec::new(), order: Vec::new() };
        // The key may not be allowed to read flows, or the flow was deleted: then the tree is in another order.
        if let Ok(flow) = remote.flow(&moment.run.flow, Some(&moment.run.version)).await {
            moment.order = flow.analysis.levels.into_iter().flatten().collect();
        }
        if !moment.run.trimmed {
            moment.steps = remote.list_of(&format!("/v1/runs/{}/steps", segment(run)), &[]).await?;
        }
        Ok(moment)
    }

    pub fn lines(&self, width: usize) -> Vec<Line> {
        let glance = Glance { run: &self.run, steps: &self.steps, order: &self.order, now_ms: moment::now_ms() };
        draw(&glance, width)
    }
}

async fn fresh(remote: &Remote, run: &str) -> Result<(RunInfo, Vec<StepInfo>), Trouble> {
    let path = format!("/v1/runs/{}", segment(run));
    let steps = remote.list_of(&format!("{path}/steps"), &[]).await?;
    Ok((remote.get(&path, &[]).await?, steps))
}

/// Lines that the caller adds above the picture.
pub type Notes = tokio::sync::watch::Receiver<Vec<Line>>;

/// Follows a run and the runs that continue it; returns the last one after its end.
pub async fn watch(ctx: &Context, remote: &Remote, run: &str) -> Result<Moment, Trouble> {
    let (mut moment, _) = watch_with(ctx, remote, run, None).await?;
    while let Some(next) = moment.run.continued_as {
        until_started(remote, &next).await?;
        (moment, _) = watch_with(ctx, remote, &next, None).await?;
    }
    Ok(moment)
}

/// Waits for a run that continues another: it is started by a message that may not be delivered yet.
async fn until_started(remote: &Remote, run: &str) -> Result<(), Trouble> {
    let since = Instant::now();
    loop {
        match remote.get::<RunInfo>(&format!("/v1/runs/{}", segment(run)), &[]).await {
            Err(trouble) if trouble.exit() == Exit::NotFound && since.elapsed() < PATIENCE => {
                tokio::time::sleep(GAP).await;
            }
            found => return found.map(|_| ()),
        }
    }
}

/// Follows a run to its end, with notes above the picture; returns the run and the number of its records.
pub async fn watch_with(
    ctx: &Context,
    remote: &Remote,
    run: &str,
    notes: Option<Notes>,
) -> Result<(Moment, u64), Trouble> {
    let mut moment = Moment::read(remote, run).await?;
    let mut timeline = Timeline::new(remote.clone(), run, 0);
    let mut drawing = Drawing { screen: &ctx.screen, drawn: 0, notes, noted: 0 };
    drawing.draw(&moment)?;
    let mut read_at = Instant::now();
    while !timeline.ended && !moment.run.trimmed {
        let records = drawing.ticking(&moment, timeline.next()).await?;
        drawing.draw(&moment)?;
        for record in &records {
            drawing.record(record)?;
        }
        if !records.is_empty() && (ctx.screen.live || timeline.ended) {
            tokio::time::sleep_until(read_at + GAP).await;
            let read = drawing.ticking(&moment, patiently(|| fresh(remote, run))).await?;
            read_at = Instant::now();
            (moment.run, moment.steps) = read;
        }
    }
    drawing.finish(&moment)?;
    Ok((moment, timeline.length()))
}

struct Drawing<'a> {
    screen: &'a Screen,
    /// Lines on the terminal that the next drawing overwrites.
    drawn: usize,
    notes: Option<Notes>,
    /// Notes that were already printed, if the screen is not redrawn.
    noted: usize,
}

impl Drawing<'_> {
    /// Redraws every `TICK` until `what` completes.
    async fn ticking<T>(
        &mut self,
        moment: &Moment,
        what: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        tokio::pin!(what);
        loop {
            match tokio::time::timeout(TICK, &mut what).await {
                Ok(result) => return result,
                Err(_) => self.draw(moment)?,
            }
        }
    }

    fn notes(&self) -> Vec<Line> {
        self.notes.as_ref().map(|notes| notes.borrow().clone()).unwrap_or_default()
    }

    fn record(&self, record: &serde_json::Value) -> Result<(), Trouble> {
        match (self.screen.live, self.screen.json) {
            (_, true) => self.screen.ndjson(record),
            (false, false) => self.screen.line(&timeline::line(record)),
            (true, false) => Ok(()),
        }
    }

    fn draw(&mut self, moment: &Moment) -> Result<(), Trouble> {
        if self.screen.json {
            return Ok(());
        }
        if !self.screen.live {
            return self.new_notes();
        }
        let (_, height) = self.screen.size();
        let mut lines = self.picture(moment);
        // Lines that have scrolled away cannot be overwritten.
        let room = height.saturating_sub(2).max(1);
        if lines.len() > room {
            let hidden = lines.len() - room + 1;
            lines.truncate(room - 1);
            lines.push(Line::plain(format!("… {hidden} more lines: `eddy run show`")));
        }
        self.over(&lines)
    }

    fn picture(&self, moment: &Moment) -> Vec<Line> {
        let width = self.screen.width();
        let mut lines: Vec<Line> = self.notes().into_iter().map(|note| note.cut(width)).collect();
        if !lines.is_empty() {
            lines.push(Line::default());
        }
        lines.extend(moment.lines(width));
        lines
    }

    fn new_notes(&mut self) -> Result<(), Trouble> {
        let notes = self.notes();
        self.screen.lines(notes.get(self.noted..).unwrap_or_default())?;
        self.noted = notes.len();
        Ok(())
    }

    fn over(&mut self, lines: &[Line]) -> Result<(), Trouble> {
        let mut out = String::new();
        if self.drawn > 0 {
            out.push_str(&format!("\x1b[{}A", self.drawn));
        }
        for line in lines {
            out.push_str(&format!("\x1b[2K{}\n", line.paint(self.screen.color)));
        }
        out.push_str("\x1b[J");
        self.drawn = lines.len();
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(out.as_bytes())?;
        Ok(stdout.flush()?)
    }

    /// Draws the whole picture, however long.
    fn finish(&mut self, moment: &Moment) -> Result<(), Trouble> {
        if self.screen.json {
            return Ok(());
        }
        if self.screen.live {
            let lines = self.picture(moment);
            return self.over(&lines);
        }
        self.new_notes()?;
        self.screen.say("")?;
        self.screen.lines(&moment.lines(self.screen.edge()))
    }
}
