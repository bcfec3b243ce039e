"""A custom admin site instead of Django's."""

from django.contrib import admin
from django.urls import path

from djqueue.admin import DashboardAdmin, DeadLetterAdmin, JobAdmin
from djqueue.models import Dashboard, DeadLetter, Job

office = admin.AdminSite(name="office")
office.register(Dashboard, DashboardAdmin)
office.register(Job, JobAdmin)
office.register(DeadLetter, DeadLetterAdmin)

urlpatterns = [path("office/", office.urls)]
