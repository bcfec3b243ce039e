import djqueue.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', "0013_workers"),
    ]

    operations = [
        migrations.CreateModel(
            name='Mark',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', djqueue.fields.MillisecondsField(verbose_name='at')),
                ('label', models.CharField(max_length=255, verbose_name='label')),
                ('follows', models.BigIntegerField(blank=True, editable=False, help_text='Of a version that workers noted: the one before it, or 0.', null=True, unique=True)),
            ],
            options={
                'verbose_name': 'mark',
                'verbose_name_plural': 'marks',
                'db_table': 'djqueue_mark',
                'default_permissions': ('view',),
                'indexes': [models.Index(fields=['at'], name='djqueue_mark_at')],
            },
        ),
    ]
