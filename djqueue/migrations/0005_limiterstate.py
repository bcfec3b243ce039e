from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', '0004_groupstate'),
    ]

    operations = [
        migrations.CreateModel(
            name='LimiterState',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=255, unique=True, verbose_name='name')),
                ('rate_capacity', models.IntegerField(blank=True, null=True, verbose_name='starts')),
                ('rate_per', models.BigIntegerField(blank=True, null=True, verbose_name='per milliseconds')),
                ('concurrency', models.IntegerField(blank=True, null=True, verbose_name='active at once')),
            ],
            options={
                'verbose_name': 'limiter',
                'verbose_name_plural': 'limiters',
                'db_table': 'djqueue_limiter_state',
            },
        ),
    ]
