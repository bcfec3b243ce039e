import djqueue.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', '0016_staging'),
    ]

    operations = [
        migrations.CreateModel(
            name='Import',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('write', models.CharField(max_length=255, unique=True, verbose_name='write')),
                ('updated_at', djqueue.fields.MillisecondsField(verbose_name='changed')),
                ('revision', models.IntegerField(default=1, editable=False, help_text='How often it was written.')),
                ('report', models.JSONField(default=dict, verbose_name='report')),
            ],
            options={
                'verbose_name': 'bulk import',
                'verbose_name_plural': 'bulk imports',
                'db_table': 'djqueue_import',
                'default_permissions': (),
                'indexes': [models.Index(fields=['updated_at', 'id'], name='djqueue_import_updated')],
            },
        ),
    ]
