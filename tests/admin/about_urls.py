"""Admin sites with objects that have jobs, with and without a dashboard."""

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, User
from django.urls import path

from djqueue.admin import DashboardAdmin, DjqueueJobsMixin
from djqueue.models import Dashboard


class ClientAdmin(DjqueueJobsMixin, UserAdmin):
    djq_jobs_shown = 3


class TeamAdmin(DjqueueJobsMixin, GroupAdmin):
    """With a custom template, and a subject that is not an instance."""

    change_form_template = "team.html"

    def djq_subject(self, obj):
        return f"team {obj.name}" if obj.name != "nobody" else None


class PlainAdmin(GroupAdmin):
    change_form_template = "team.html"


office = admin.AdminSite(name="office")
office.register(User, ClientAdmin)
office.register(Group, TeamAdmin)
office.register(Dashboard, DashboardAdmin)

annex = admin.AdminSite(name="annex")
annex.register(User, ClientAdmin)

plain = admin.AdminSite(name="plain")
plain.register(User, UserAdmin)
plain.register(Group, PlainAdmin)

urlpatterns = [path(f"{site.name}/", site.urls) for site in (office, annex, plain)]
