//! Runs the `eddy` binary, and servers for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use serde_json::Value;

/// The exit code and output of a command.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("not JSON: {error}: {self:?}"))
    }

    #[track_caller]
    pub fn good(self) -> Ran {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    #[track_caller]
    pub fn bad(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    /// The first line of standard output.
    pub fn line(&self) -> String {
        self.out.lines().next().unwrap_or_default().to_owned()
    }
}

/// `eddy` without the settings of the environment.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("EDDY_")) {
        command.env_remove(name);
    }
    command.env_remove("NO_COLOR").stdin(Stdio::null());
    command
}

pub fn finish(mut command: Command) -> Ran {
    let output = command.output().unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs a command on a terminal of that width, and returns the lines that it shows.
pub fn on_terminal(mut command: Command, columns: u16) -> Vec<String> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let size = rustix::termios::Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&ours, size).unwrap();
    let theirs = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    let theirs = std::fs::OpenOptions::new().read(true).write(true).open(theirs).unwrap();
    command.stdout(theirs).env("TERM", "xterm").arg("--color=never");
    let mut process = Process(command.spawn().unwrap());
    // It holds the other end of the terminal, too.
    drop(command);
    let mut shown = Vec::new();
    // Reading ends with an error when no process has the terminal open any more.
    let _ = std::fs::File::from(ours).read_to_end(&mut shown);
    assert!(process.0.wait().unwrap().success());
    String::from_utf8(shown).unwrap().lines().map(str::to_owned).collect()
}

pub fn eddy(dir: &Path, args: &[&str]) -> Ran {
    let mut command = command();
    command.current_dir(dir).args(args);
    finish(command)
}

/// A request that no command makes.
pub fn post(url: &str, path: &str, body: &Value) -> Value {
    let addr = url.trim_start_matches("http://").trim_end_matches('/');
    let body = body.to_string();
    let mut stream = TcpStream::connect(addr).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 20"), "{reply}");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("not JSON: {error}: {reply}"))
}

/// A server that gives these responses, one after the other, whatever the requests. Returns its address and, at the
/// end, the first lines of the requests. Every response has `retry-after: 60`.
pub fn scripted(answers: Vec<(u16, Value)>) -> (String, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |(status, body): (u16, Value)| {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
        let asked = lines.next().unwrap();
        assert!(lines.any(|line| line.is_empty()), "the head of a request has no end");
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {status} .\r\nconnection: close\r\nretry-after: 60\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        asked
    };
    (url, std::thread::spawn(move || answers.into_iter().map(answer).collect()))
}

/// A process that is killed when it is dropped.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server on a free port, and a folder to work in.
pub struct Server {
    pub url: String,
    pub dir: tempfile::TempDir,
    process: Process,
}

impl Server {
    pub fn start() -> Server {
        Server::with(&[])
    }

    pub fn with(args: &[&str]) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let (process, url) =
            Server::serve(dir.path(), &[&["--store", "memory:", "--listen", "127.0.0.1:0"], args].concat());
        Server { url, dir, process }
    }

    /// A server with a store on disk.
    pub fn on_disk() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let (process, url) = Server::serve(dir.path(), &["--store", "store", "--listen", "127.0.0.1:0"]);
        Server { url, dir, process }
    }

    /// A server that logs at debug level, as JSON, to the file `log` of its folder.
    pub fn logging() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let mut command = command();
        command.current_dir(dir.path()).args(["serve", "--store", "memory:", "--listen", "127.0.0.1:0", "--log-json"]);
        command.env("EDDY_LOG", "debug").stderr(std::fs::File::create(dir.path().join("log")).unwrap());
        let (process, url) = Server::spawn(command);
        Server { url, dir, process }
    }

    /// The log lines with this message so far.
    pub fn logged(&self, message: &str) -> Vec<Value> {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["message"] == message).collect()
    }

    /// Stops a server with a store on disk, and starts it again on the same store and address.
    pub fn restart(&mut self) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.process.0.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.process.0.wait().unwrap().success());
        let listen = self.url.trim_start_matches("http://").to_owned();
        (self.process, self.url) = Server::serve(self.dir.path(), &["--store", "store", "--listen", &listen]);
    }

    /// Starts a server with these flags and no others.
    pub fn serve(dir: &Path, args: &[&str]) -> (Process, String) {
        let mut command = command();
        command.current_dir(dir).arg("serve").args(args).env("EDDY_LOG", "error");
        Server::spawn(command)
    }

    /// The process and its address.
    fn spawn(mut command: Command) -> (Process, String) {
        let mut process = Process(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let url = loop {
            let line = lines.next().expect("the server does not print its address").unwrap();
            if let Some((_, url)) = line.split_once("listens on ") {
                break url.trim().to_owned();
            }
        };
        (process, url)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = command();
        command.current_dir(self.dir.path()).env("EDDY_URL", &self.url).args(args);
        command
    }

    pub fn eddy(&self, args: &[&str]) -> Ran {
        finish(self.command(args))
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }

    pub fn apply(&self, text: &str) {
        self.write("flow.yaml", text);
        self.eddy(&["flow", "apply", "flow.yaml"]).good();
    }

    /// Starts a worker, and returns the lines of its standard error.
    pub fn worker(&self, args: &[&str]) -> (Process, impl Iterator<Item = String> + use<>) {
        let mut command = self.command(&["worker", "exec"]);
        let mut process = Process(command.args(args).stderr(Stdio::piped()).spawn().unwrap());
        let lines = BufReader::new(process.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        (process, lines)
    }
}
