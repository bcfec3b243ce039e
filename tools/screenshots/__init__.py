"""Pictures of the dashboard for the docs, made from the running demo by `make screenshots`."""
