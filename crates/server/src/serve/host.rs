//! The name of this machine.

/// As the kernel has it; none if it cannot be read.
pub(super) fn name() -> Option<String> {
    let name =
        std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::fs::read_to_string("/etc/hostname"));
    name.ok().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}
