"""Generated programs behind the kernel's walls: one process, no network, no files of the user."""
