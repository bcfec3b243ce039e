"""What joins djqueue to other systems; each needs an extra."""
