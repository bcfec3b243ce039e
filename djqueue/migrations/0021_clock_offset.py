"""Where the wall clock was that a scheduler's jobs have followed."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ('djqueue', '0020_deadletter_unmet'),
    ]

    operations = [
        migrations.AddField(
            model_name='schedulerlease',
            name='clock_offset',
            field=models.BigIntegerField(
                help_text="Milliseconds from the machine's start to the wall clock that jobs follow.", null=True
            ),
        ),
    ]
