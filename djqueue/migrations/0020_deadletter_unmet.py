"""What a job that failed for its dependencies is put behind when it is retried."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ('djqueue', '0019_claims'),
    ]

    operations = [
        migrations.AddField(
            model_name='deadletter',
            name='unmet',
            field=models.TextField(blank=True, db_default='', default='', help_text='JSON: queue and job id of each.', verbose_name='dependencies that had not completed'),
        ),
    ]
