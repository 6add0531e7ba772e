//! Compiles `gather.c`, the VFS through which SQLite writes its log, against the header of the linked SQLite.

fn main() {
    let source = "src/embedded/gather.c";
    println!("cargo:rerun-if-changed={source}");
    let mut build = cc::Build::new();
    build.file(source).std("c11").warnings(true).extra_warnings(true);
    if let Ok(include) = std::env::var("DEP_SQLITE3_INCLUDE") {
        build.include(include);
    }
    // No Rust code calls into it (it registers itself with SQLite), so the linker would drop it.
    build.link_lib_modifier("+whole-archive").compile("eddyline_gather");
}
