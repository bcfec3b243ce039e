from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', '0007_jobitem'),
    ]

    operations = [
        migrations.AddField(
            model_name='groupstate',
            name='rate_capacity',
            field=models.IntegerField(blank=True, null=True, verbose_name='starts'),
        ),
        migrations.AddField(
            model_name='groupstate',
            name='rate_per',
            field=models.BigIntegerField(blank=True, null=True, verbose_name='per milliseconds'),
        ),
        migrations.AddField(
            model_name='groupstate',
            name='weight',
            field=models.IntegerField(blank=True, null=True, verbose_name='weight'),
        ),
    ]
