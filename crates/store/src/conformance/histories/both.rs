//! Operations on both stores that compare the results.

use std::fmt::Debug;

use eddyline_machine::{Millis, RunId};

use super::super::commits::word;
use super::Same;
use super::world::World;
use crate::*;

/// Whether the trait specifies the order of a claim's tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Said,
    /// The claim is repeated: compare only the set of tasks.
    Unsaid,
}

impl World<'_> {
    pub async fn commit(&mut self, commit: RunCommit) -> Same<std::result::Result<Committed, Refused>> {
        Ok(self.write(vec![commit], Vec::new()).await?.commands.remove(0))
    }

    /// Commits and claims in one call.
    pub async fn write(&mut self, commits: Vec<RunCommit>, claims: Vec<(ClaimRequest, Order)>) -> Same<Written> {
        for commit in &commits {
            let transition = &commit.transition;
            self.tell(format!(
                "  commit of {} at {} with {:?}, taking {:?}",
                transition.header.run, transition.base, transition.answers, commit.takes
            ));
        }
        self.promised.clear();
        let commands = || commits.iter().cloned().map(Command::Run).collect::<Vec<_>>();
        let requests = || claims.iter().map(|(request, _)| request.clone()).collect::<Vec<_>>();
        let expected = self.drive.store.commit(commands(), requests()).await.unwrap();
        let found = self.subject.commit(commands(), requests()).await.unwrap();
        same("the results of commits", &expected.commands, &found.commands)?;
        same("the number of claims", &expected.claims.len(), &found.claims.len())?;
        for answer in &expected.commands {
            self.reach(&word(answer));
        }
        for (at, (request, order)) in claims.iter().enumerate() {
            let (expected, found) = (&expected.claims[at], &found.claims[at]);
            self.tell(format!(
                "  claim by {} of {:?}, at most {}: {:?}",
                request.worker,
                request.queues,
                request.max,
                expected.tasks.iter().map(|claimed| (claimed.run, claimed.task.fence)).collect::<Vec<_>>()
            ));
            let tasks = |claims: &Claims| {
                let mut tasks = claims.tasks.clone();
                if *order == Order::Unsaid {
                    tasks.sort_by_key(|claimed| (claimed.run, claimed.task.fence));
                }
                tasks
            };
            same("the tasks of a claim", &tasks(expected), &tasks(found))?;
            if let Some(at) = expected.retry_at
                && found.retry_at.is_none_or(|found| found > at)
            {
                return Err(format!("there is more at {at}, but retry_at is {:?}", found.retry_at));
            }
            if expected.retry_at.is_some() {
                self.reach("held back");
            }
        }
        for commit in commits {
            if !commit.transition.is_empty() {
                self.done.push(commit);
            }
        }
        Ok(expected)
    }

    /// Changes documents. An expected revision is given relative to the current one, since each store has its own
    /// numbers.
    pub async fn change_documents(&mut self, changes: Vec<DocumentChange>) -> Same {
        self.write_documents(DocumentCommit { documents: changes, ..self.drive.nothing() }).await
    }

    pub async fn write_documents(&mut self, commit: DocumentCommit) -> Same {
        self.tell(format!("  documents, messages and events: {commit:?}"));
        self.promised.clear();
        let mut answers = Vec::new();
        for store in [self.references(), self.subject.clone()] {
            let mut commit = commit.clone();
            for change in &mut commit.documents {
                if let Expect::Revision(behind) = change.expect {
                    change.expect = Expect::Revision(revision(&*store, &commit.ns, &change.key).await + behind);
                }
            }
            let mut written = store.commit(vec![Command::Documents(commit)], Vec::new()).await.unwrap();
            answers.push(match written.commands.remove(0) {
                Err(Refused::Revision { key, current }) => Err(Refused::Revision { key, current: current.map(|_| 0) }),
                other => other,
            });
        }
        self.reach(&word(&answers[0]));
        same("the result of a change of documents", &answers[0], &answers[1])
    }

    pub async fn extend(&mut self, worker: Option<&str>, leases: &[Lease]) -> Same {
        self.tell(format!("  {worker:?} extends {leases:?}"));
        let expected = self.drive.store.extend(&self.drive.ns, worker, leases).await.unwrap();
        let found = self.subject.extend(&self.drive.ns, worker, leases).await.unwrap();
        for extended in &expected {
            match extended {
                Extended::Lost => self.reach("lost"),
                Extended::Until { closed: true, .. } => self.reach("closed"),
                Extended::Until { .. } => self.reach("until"),
            }
        }
        same("the extended leases", &expected, &found)
    }

    /// Compares the due items of both stores, and checks that none is due before the promised time.
    pub async fn due(&mut self, what: Due, limit: usize) -> Same<Vec<DueItem>> {
        let expected = self.drive.due(what, limit).await;
        let found = self.subject.due(what, &[], limit).await.unwrap();
        let now = self.drive.now().await;
        let items = |batch: &DueBatch| {
            let mut items: Vec<String> = batch.items.iter().map(item).collect();
            items.sort();
            items
        };
        self.tell(format!("  due {what:?}: {:?}", items(&expected)));
        same("the due items", &items(&expected), &items(&found))?;
        let name = format!("{what:?}");
        if let Some(until) = self.promised.get(&name)
            && now < *until
            && !found.items.is_empty()
        {
            return Err(format!("{what:?} were due at {now}, but next_in promised none before {until}"));
        }
        self.promised.insert(name, found.next_in.map_or(Millis::MAX, |next| now + next));
        Ok(expected.items)
    }

    /// Deletes in both stores until nothing is left to delete.
    pub async fn trim(&mut self, what: &Trim) -> Same {
        self.tell(format!("  trim {what:?}"));
        self.promised.clear();
        for store in [self.references(), self.subject.clone()] {
            while store.trim(what).await.unwrap() {}
        }
        Ok(())
    }

    /// Compares a page of runs under a filter, and their count.
    pub async fn read_runs(&mut self, filter: &RunFilter, skip: usize, limit: usize) -> Same {
        let ns = self.drive.ns.clone();
        let mut answers = Vec::new();
        for store in [self.references(), self.subject.clone()] {
            let first = store.runs(Some(&ns), filter, Page { after: None, limit: skip.max(1) }).await.unwrap();
            let after = first.last().map(|summary| summary.position);
            let page = store.runs(Some(&ns), filter, Page { after, limit }).await.unwrap();
            let runs: Vec<RunId> = first.iter().chain(&page).map(|summary| summary.run).collect();
            answers.push((runs, store.count_runs(&ns, filter).await.unwrap()));
        }
        same(&format!("the runs of {filter:?}"), &answers[0], &answers[1])
    }
}

async fn revision(store: &dyn Store, ns: &Namespace, key: &DocumentKey) -> u64 {
    let filter = DocumentFilter { kind: key.kind.clone(), id: Some(key.id.clone()), ..DocumentFilter::default() };
    store.documents(Some(ns), &filter, 1).await.unwrap().first().map_or(0, |found| found.revision)
}

fn item(item: &DueItem) -> String {
    match item {
        DueItem::Document(document) => format!("{:?}", Document { revision: 0, ..document.clone() }),
        other => format!("{other:?}"),
    }
}

pub fn same<T: PartialEq + Debug>(what: &str, expected: &T, found: &T) -> Same {
    match expected == found {
        true => Ok(()),
        false => Err(format!("{what} differ\n  expected {expected:?}\n  found    {found:?}")),
    }
}
