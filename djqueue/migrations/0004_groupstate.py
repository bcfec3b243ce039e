from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', '0003_schedules'),
    ]

    operations = [
        migrations.CreateModel(
            name='GroupState',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('queue', models.CharField(max_length=255, verbose_name='queue')),
                ('group', models.CharField(blank=True, max_length=255, verbose_name='group')),
                ('concurrency', models.IntegerField(blank=True, null=True, verbose_name='active at once')),
                ('paused', models.BooleanField(default=False, verbose_name='paused')),
                ('mode', models.CharField(blank=True, max_length=16, verbose_name='mode')),
            ],
            options={
                'verbose_name': 'group',
                'verbose_name_plural': 'groups',
                'db_table': 'djqueue_group_state',
                'constraints': [models.UniqueConstraint(fields=('queue', 'group'), name='djqueue_group_state_key')],
            },
        ),
    ]
