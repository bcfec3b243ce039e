"""The flights of 2013 as recorded, and what the claims office makes of them."""

from django.db import models
from django.db.models import Q
from django.utils.timezone import localtime

from .rules import BADLY_DELAYED_MINUTES, Band


class Airline(models.Model):
    code = models.CharField(max_length=2, primary_key=True)
    name = models.CharField(max_length=60)

    class Meta:
        ordering = ["code"]

    def __str__(self) -> str:
        return self.name


class Airport(models.Model):
    code = models.CharField("FAA code", max_length=3, primary_key=True)
    name = models.CharField(
        max_length=60,
        blank=True,
        help_text="Empty for airports that flights name and the airports' list lacks.",
    )
    latitude = models.FloatField(null=True, blank=True)
    longitude = models.FloatField(null=True, blank=True)

    class Meta:
        ordering = ["code"]

    def __str__(self) -> str:
        return f"{self.code} {self.name}".strip()


class Plane(models.Model):
    tail_number = models.CharField(max_length=6, primary_key=True)
    manufacturer = models.CharField(max_length=40)
    model = models.CharField(max_length=30)
    year = models.PositiveSmallIntegerField("year built", null=True, blank=True)
    seats = models.PositiveSmallIntegerField()

    class Meta:
        ordering = ["tail_number"]

    def __str__(self) -> str:
        return self.tail_number


class Weather(models.Model):
    """One hour at one of New York's airports."""

    airport = models.ForeignKey(Airport, on_delete=models.CASCADE, related_name="weather")
    hour = models.DateTimeField()
    temperature = models.FloatField("temperature, °F", null=True, blank=True)
    wind_speed = models.FloatField("wind, mph", null=True, blank=True)
    wind_gust = models.FloatField("gusts, mph", null=True, blank=True)
    precipitation = models.FloatField("precipitation, inches", null=True, blank=True)
    visibility = models.FloatField("visibility, miles", null=True, blank=True)

    class Meta:
        ordering = ["hour", "airport"]
        verbose_name_plural = "weather"
        constraints = [models.UniqueConstraint(fields=["airport", "hour"], name="one_weather_record_an_hour")]

    def __str__(self) -> str:
        return f"{self.airport_id} {self.hour:%Y-%m-%d %H:%M}"


class FlightQuerySet(models.QuerySet["Flight"]):
    def badly_delayed(self) -> "FlightQuerySet":
        """Flights that the rule in rules.py is about, those that cannot be assessed included."""
        late = Q(arrival_delay__gte=BADLY_DELAYED_MINUTES)
        left_late = Q(arrival_delay=None, departure_delay__gte=BADLY_DELAYED_MINUTES)
        return self.filter(late | left_late)

    def arrival_unknown(self) -> "FlightQuerySet":
        return self.filter(arrival_delay=None)

    def aircraft_unknown(self) -> "FlightQuerySet":
        return self.exclude(arrival_delay=None).filter(plane=None)

    def touching(self, airport: str) -> "FlightQuerySet":
        return self.filter(Q(origin=airport) | Q(destination=airport))


class Flight(models.Model):
    """One scheduled departure from New York."""

    airline = models.ForeignKey(Airline, on_delete=models.PROTECT, related_name="flights")
    number = models.PositiveSmallIntegerField()
    tail_number = models.CharField(max_length=6, blank=True)
    plane = models.ForeignKey(
        Plane,
        on_delete=models.PROTECT,
        related_name="flights",
        null=True,
        blank=True,
        help_text="Empty where no record of the aircraft exists.",
    )
    origin = models.ForeignKey(Airport, on_delete=models.PROTECT, related_name="departures")
    destination = models.ForeignKey(Airport, on_delete=models.PROTECT, related_name="arrivals")
    distance = models.PositiveSmallIntegerField("distance, miles")
    scheduled_departure = models.DateTimeField()
    departure_delay = models.SmallIntegerField(
        "departure delay, min",
        null=True,
        blank=True,
        help_text="Empty when the flight was cancelled.",
    )
    arrival_delay = models.SmallIntegerField(
        "arrival delay, min",
        null=True,
        blank=True,
        help_text="Empty when the flight was cancelled or diverted, or no arrival was recorded.",
    )

    objects = FlightQuerySet.as_manager()

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["arrival_delay", "departure_delay"], name="flight_delays")]
        constraints = [
            models.UniqueConstraint(
                fields=["scheduled_departure", "airline", "number"], name="one_departure_of_a_flight"
            )
        ]

    def __str__(self) -> str:
        day = localtime(self.scheduled_departure).date()
        return f"{self.airline_id} {self.number} {self.origin_id}-{self.destination_id} {day}"

    @property
    def cancelled(self) -> bool:
        return self.departure_delay is None


class Compensation(models.Model):
    """What an airline owes the passengers of one flight."""

    class BandChoices(models.TextChoices):
        SHORT = Band.SHORT, "up to 1,500 km"
        MEDIUM = Band.MEDIUM, "up to 3,500 km"
        LONG = Band.LONG, "over 3,500 km"

    flight = models.OneToOneField(Flight, on_delete=models.CASCADE, related_name="compensation")
    band = models.CharField(max_length=6, choices=BandChoices)
    delay = models.PositiveSmallIntegerField("delay, min")
    seats = models.PositiveSmallIntegerField()
    extraordinary = models.BooleanField("extraordinary weather")
    per_passenger = models.PositiveSmallIntegerField("per passenger, $")
    total = models.PositiveIntegerField("total, $")
    assessed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["-total", "flight_id"]

    def __str__(self) -> str:
        return f"${self.total:,} for {self.flight}"


class DelayChart(models.Model):
    airport = models.OneToOneField(Airport, on_delete=models.CASCADE, related_name="delay_chart")
    image = models.ImageField(upload_to="charts")
    flights = models.PositiveIntegerField()
    drawn_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["airport"]

    def __str__(self) -> str:
        return f"Delays at {self.airport}"


class Digest(models.Model):
    """One mail to one airline about its claims; the row keeps the mail from going out twice."""

    airline = models.OneToOneField(Airline, on_delete=models.CASCADE, related_name="digest")
    claims = models.PositiveIntegerField()
    refused = models.PositiveIntegerField()
    total = models.PositiveIntegerField("total, $")
    sent_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["airline"]

    def __str__(self) -> str:
        return f"Digest for {self.airline}"
