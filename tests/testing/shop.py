"""Jobs of users, and views that wait for them."""

from django.contrib.auth.models import User
from django.http import JsonResponse
from django.urls import path

from djqueue import JobType, job


def name_of() -> JobType:
    @job(name="name-of")
    def name_of(pk):
        return User.objects.get(pk=pk).username

    return name_of


def aname_of() -> JobType:
    @job(name="aname-of")
    async def name_of(pk):
        return (await User.objects.aget(pk=pk)).username

    return name_of


def view(request, pk):
    return JsonResponse({"name": name_of().enqueue_and_wait(pk)})


async def aview(request, pk):
    return JsonResponse({"name": await aname_of().aenqueue_and_wait(pk)})


async def mixed_view(request, pk):
    return JsonResponse({"name": await name_of().aenqueue_and_wait(pk)})


urlpatterns = [path("sync/<int:pk>", view), path("async/<int:pk>", aview), path("mixed/<int:pk>", mixed_view)]
