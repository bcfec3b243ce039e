import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Airline',
            fields=[
                ('code', models.CharField(max_length=2, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=60)),
            ],
            options={
                'ordering': ['code'],
            },
        ),
        migrations.CreateModel(
            name='Airport',
            fields=[
                ('code', models.CharField(max_length=3, primary_key=True, serialize=False, verbose_name='FAA code')),
                ('name', models.CharField(blank=True, help_text="Empty for airports that flights name and the airports' list lacks.", max_length=60)),
                ('latitude', models.FloatField(blank=True, null=True)),
                ('longitude', models.FloatField(blank=True, null=True)),
            ],
            options={
                'ordering': ['code'],
            },
        ),
        migrations.CreateModel(
            name='Plane',
            fields=[
                ('tail_number', models.CharField(max_length=6, primary_key=True, serialize=False)),
                ('manufacturer', models.CharField(max_length=40)),
                ('model', models.CharField(max_length=30)),
                ('year', models.PositiveSmallIntegerField(blank=True, null=True, verbose_name='year built')),
                ('seats', models.PositiveSmallIntegerField()),
            ],
            options={
                'ordering': ['tail_number'],
            },
        ),
        migrations.CreateModel(
            name='DelayChart',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('image', models.ImageField(upload_to='charts')),
                ('flights', models.PositiveIntegerField()),
                ('drawn_at', models.DateTimeField(auto_now=True)),
                ('airport', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='delay_chart', to='flights.airport')),
            ],
            options={
                'ordering': ['airport'],
            },
        ),
        migrations.CreateModel(
            name='Digest',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('claims', models.PositiveIntegerField()),
                ('refused', models.PositiveIntegerField()),
                ('total', models.PositiveIntegerField(verbose_name='total, $')),
                ('sent_at', models.DateTimeField(auto_now_add=True)),
                ('airline', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='digest', to='flights.airline')),
            ],
            options={
                'ordering': ['airline'],
            },
        ),
        migrations.CreateModel(
            name='Flight',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveSmallIntegerField()),
                ('tail_number', models.CharField(blank=True, max_length=6)),
                ('distance', models.PositiveSmallIntegerField(verbose_name='distance, miles')),
                ('scheduled_departure', models.DateTimeField()),
                ('departure_delay', models.SmallIntegerField(blank=True, help_text='Empty when the flight was cancelled.', null=True, verbose_name='departure delay, min')),
                ('arrival_delay', models.SmallIntegerField(blank=True, help_text='Empty when the flight was cancelled or diverted, or no arrival was recorded.', null=True, verbose_name='arrival delay, min')),
                ('airline', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='flights', to='flights.airline')),
                ('destination', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='arrivals', to='flights.airport')),
                ('origin', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='departures', to='flights.airport')),
                ('plane', models.ForeignKey(blank=True, help_text='Empty where no record of the aircraft exists.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='flights', to='flights.plane')),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='Compensation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('band', models.CharField(choices=[('short', 'up to 1,500 km'), ('medium', 'up to 3,500 km'), ('long', 'over 3,500 km')], max_length=6)),
                ('delay', models.PositiveSmallIntegerField(verbose_name='delay, min')),
                ('seats', models.PositiveSmallIntegerField()),
                ('extraordinary', models.BooleanField(verbose_name='extraordinary weather')),
                ('per_passenger', models.PositiveSmallIntegerField(verbose_name='per passenger, $')),
                ('total', models.PositiveIntegerField(verbose_name='total, $')),
                ('assessed_at', models.DateTimeField(auto_now=True)),
                ('flight', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='compensation', to='flights.flight')),
            ],
            options={
                'ordering': ['-total', 'flight_id'],
            },
        ),
        migrations.CreateModel(
            name='Weather',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('hour', models.DateTimeField()),
                ('temperature', models.FloatField(blank=True, null=True, verbose_name='temperature, °F')),
                ('wind_speed', models.FloatField(blank=True, null=True, verbose_name='wind, mph')),
                ('wind_gust', models.FloatField(blank=True, null=True, verbose_name='gusts, mph')),
                ('precipitation', models.FloatField(blank=True, null=True, verbose_name='precipitation, inches')),
                ('visibility', models.FloatField(blank=True, null=True, verbose_name='visibility, miles')),
                ('airport', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='weather', to='flights.airport')),
            ],
            options={
                'verbose_name_plural': 'weather',
                'ordering': ['hour', 'airport'],
            },
        ),
        migrations.AddIndex(
            model_name='flight',
            index=models.Index(fields=['arrival_delay', 'departure_delay'], name='flight_delays'),
        ),
        migrations.AddConstraint(
            model_name='weather',
            constraint=models.UniqueConstraint(fields=('airport', 'hour'), name='one_weather_record_an_hour'),
        ),
    ]
