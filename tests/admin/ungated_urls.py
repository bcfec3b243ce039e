"""An admin site with a list that does not use the gate."""

from django.contrib import admin
from django.urls import path

from djqueue.admin import DashboardAdmin
from djqueue.models import Dashboard, Job


class UngatedAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A list of all rows, with Django's own forms."""

    list_display = ("job_id", "queue")


site = admin.AdminSite(name="ungated")
site.register(Dashboard, DashboardAdmin)
site.register(Job, UngatedAdmin)

urlpatterns = [path("admin/", site.urls)]
