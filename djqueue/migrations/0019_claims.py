import djqueue.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("djqueue", "0018_rollup"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="token",
            field=models.BigIntegerField(default=0, help_text="Of the present claim, or of the last one.", verbose_name="fencing token"),
        ),
        migrations.AddField(
            model_name="job",
            name="process",
            field=models.CharField(blank=True, default="", help_text="Process that holds the claim; empty: the scheduler's own.", max_length=255, verbose_name="process"),
        ),
        migrations.AddField(
            model_name="job",
            name="leased_until",
            field=djqueue.fields.MillisecondsField(blank=True, help_text="When the claim ends unless renewed.", null=True, verbose_name="leased until"),
        ),
    ]
