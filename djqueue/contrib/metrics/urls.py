"""URLs to include in the project's: `path("djqueue/", include("djqueue.contrib.metrics.urls"))`."""

from django.urls import path

from . import views

app_name = "djqueue_metrics"
urlpatterns = [
    path("metrics", views.metrics, name="metrics"),
    path("scaling", views.scaling, name="scaling"),
]
