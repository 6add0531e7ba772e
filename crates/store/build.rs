//! Compiles the file system that SQLite writes its log through, against the header of the SQLite that is linked.

fn main() {
    let source = "src/embedded/gather.c";
    println!("cargo:rerun-if-changed={source}");
    let mut build = cc::Build::new();
    build.file(source).std("c11").warnings(true).extra_warnings(true);
    if let Ok(include) = std::env::var("DEP_SQLITE3_INCLUDE") {
        build.include(include);
    }
    // Nobody calls into it: it makes itself known to SQLite, so the linker must not leave it out.
    build.link_lib_modifier("+whole-archive").compile("eddyline_gather");
}
