from django.urls import include, path

urlpatterns = [path("djqueue/", include("djqueue.contrib.metrics.urls"))]
