//! `Data::memory_bytes` is close to the real memory of a payload, however small its elements are.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use eddyline_machine::{Data, ValueId, ValueRef};
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const ELEMENTS: usize = 10_000;

fn list(element: impl Fn(usize) -> Data) -> Data {
    Data::List(Arc::new((0..ELEMENTS).map(element).collect()))
}

fn inline(element: impl Fn(usize) -> Value) -> Data {
    list(|n| Data::from(element(n)))
}

type Case = (&'static str, fn() -> Data);

const CASES: [Case; 6] = [
    ("numbers", || inline(|n| json!(n))),
    ("texts", || inline(|n| json!(format!("{n:0200}")))),
    ("lists of numbers", || inline(|n| json!(vec![n; 50]))),
    ("objects", || inline(|n| json!({"id": n, "name": format!("item {n}"), "tags": ["a", "b"]}))),
    ("references", || {
        list(|n| Data::Ref(ValueRef { id: ValueId(n as u32), bytes: 1_000, depth: 1, read_size: Default::default() }))
    }),
    ("fields", || {
        Data::Map(Arc::new((0..ELEMENTS).map(|n| (format!("key {n}").into(), Data::from(json!(n)))).collect()))
    }),
];

#[test]
fn a_payload_takes_about_as_much_memory_as_it_says() {
    for (name, make) in CASES {
        let profiler = dhat::Profiler::builder().testing().build();
        let data = make();
        let real = dhat::HeapStats::get().curr_bytes;
        drop(profiler);
        let estimated = data.memory_bytes(usize::MAX);
        assert!(estimated > real * 2 / 3 && estimated < real * 2, "{name}: estimated {estimated}, allocated {real}");
    }
}
