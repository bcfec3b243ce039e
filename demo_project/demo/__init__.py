"""The whole demo with one command: python -m demo_project.demo."""
