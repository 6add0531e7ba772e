//! `eddy demo`.

use super::rig::{command, finish};

#[test]
fn an_order_survives_the_death_of_its_engine() {
    let place = tempfile::tempdir().unwrap();
    let mut demo = command();
    demo.arg("demo").env("TMPDIR", place.path());
    let ran = finish(demo).good();
    for sign in ["was killed (SIGKILL)", "the run continues", "✓ reserve", "3 attempts", "– review", "charged 1 time"]
    {
        assert!(ran.out.contains(sign), "{sign} is not in {}", ran.out);
    }
    let process = |sign: &str| {
        let line = ran.out.lines().find(|line| line.contains(sign)).unwrap();
        let digits = line.split("process ").nth(1).unwrap();
        digits.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<i32>().unwrap()
    };
    let (first, second) = (process("was killed"), process("opened the same store"));
    assert_ne!(first, second);
    for pid in [first, second] {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        assert!(rustix::process::test_kill_process(pid).is_err(), "process {pid:?} is still there");
    }
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "its folder was not removed");
}
