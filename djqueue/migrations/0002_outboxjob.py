import djqueue.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='OutboxJob',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('queue', models.CharField(max_length=255, verbose_name='queue')),
                ('name', models.CharField(max_length=255, verbose_name='job name')),
                ('job_id', models.CharField(max_length=255, verbose_name='job id')),
                ('fresh', models.BooleanField(default=False, help_text='Whether the id was made for this job, and not given.', verbose_name='new id')),
                ('payload', models.BinaryField(verbose_name='payload')),
                ('options', models.BinaryField(help_text='Options that differ from their defaults, as MessagePack.', verbose_name='options')),
                ('run_at', djqueue.fields.MillisecondsField(blank=True, null=True, verbose_name='not before')),
                ('created_at', djqueue.fields.MillisecondsField(verbose_name='enqueued')),
            ],
            options={
                'verbose_name': 'job on its way to Redis',
                'verbose_name_plural': 'jobs on their way to Redis',
                'db_table': 'djqueue_outbox_job',
            },
        ),
    ]
