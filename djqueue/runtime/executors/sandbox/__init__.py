"""The sandbox of a job type: its permissions, enforced by the kernel with Landlock and seccomp."""
