"""The claims office in the admin."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from djqueue.admin import DjqueueJobsMixin

from .models import Airline, Airport, Compensation, DelayChart, Digest, Flight, Plane, Weather


@admin.register(Airline)
class AirlineAdmin(DjqueueJobsMixin, admin.ModelAdmin):
    list_display = ("code", "name")
    search_fields = ("code", "name")


@admin.register(Airport)
class AirportAdmin(DjqueueJobsMixin, admin.ModelAdmin):
    list_display = ("code", "name", "latitude", "longitude")
    search_fields = ("code", "name")


@admin.register(Plane)
class PlaneAdmin(admin.ModelAdmin):
    list_display = ("tail_number", "manufacturer", "model", "year", "seats")
    list_filter = ("manufacturer",)
    search_fields = ("tail_number", "model")


@admin.register(Weather)
class WeatherAdmin(admin.ModelAdmin):
    list_display = (
        "hour",
        "airport",
        "temperature",
        "wind_speed",
        "wind_gust",
        "precipitation",
        "visibility",
    )
    date_hierarchy = "hour"
    raw_id_fields = ("airport",)


class BadlyDelayedFilter(admin.SimpleListFilter):
    title = "badly delayed"
    parameter_name = "badly_delayed"

    def lookups(self, _request: HttpRequest, _model_admin: admin.ModelAdmin) -> list[tuple[str, str]]:
        return [("yes", "Yes"), ("assessed", "Yes, assessed"), ("unassessed", "Yes, not assessed")]

    def queryset(self, _request: HttpRequest, queryset: QuerySet[Flight]) -> QuerySet[Flight]:
        if self.value() is None:
            return queryset
        flights = queryset & Flight.objects.badly_delayed()
        if self.value() == "yes":
            return flights
        return flights.filter(compensation__isnull=self.value() == "unassessed")


@admin.register(Flight)
class FlightAdmin(admin.ModelAdmin):
    list_display = (
        "scheduled_departure",
        "airline",
        "number",
        "origin_id",
        "destination_id",
        "tail_number",
        "departure_delay",
        "arrival_delay",
    )
    list_filter = (BadlyDelayedFilter, "airline", "origin")
    list_select_related = ("airline",)
    search_fields = ("tail_number__exact", "number__exact", "destination__code__exact")
    raw_id_fields = ("plane", "origin", "destination")
    show_full_result_count = False


@admin.register(Compensation)
class CompensationAdmin(admin.ModelAdmin):
    list_display = (
        "flight",
        "band",
        "delay",
        "seats",
        "per_passenger",
        "total",
        "extraordinary",
        "assessed_at",
    )
    list_filter = ("band", "extraordinary", "flight__airline")
    list_select_related = ("flight",)
    search_fields = ("flight__tail_number", "flight__number__exact")
    raw_id_fields = ("flight",)


@admin.register(DelayChart)
class DelayChartAdmin(admin.ModelAdmin):
    list_display = ("airport", "flights", "drawn_at", "thumbnail")
    list_select_related = ("airport",)
    search_fields = ("airport__code", "airport__name")
    readonly_fields = ("airport", "flights", "chart", "drawn_at")
    fields = readonly_fields

    @admin.display(description="chart")
    def thumbnail(self, chart: DelayChart) -> SafeString:
        return image(chart, width=240)

    @admin.display(description="chart")
    def chart(self, chart: DelayChart) -> SafeString:
        return image(chart, width=960)


def image(chart: DelayChart, *, width: int) -> SafeString:
    return format_html('<img src="{}" width="{}" alt="{}">', chart.image.url, width, chart)


@admin.register(Digest)
class DigestAdmin(admin.ModelAdmin):
    list_display = ("airline", "claims", "refused", "total", "sent_at")
    list_select_related = ("airline",)
