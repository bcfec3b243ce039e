from django.apps import AppConfig


class FlightsConfig(AppConfig):
    name = "demo_project.flights"
    verbose_name = "Flights"
