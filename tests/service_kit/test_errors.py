"""Errors are declared by class keywords: what a class leaves out it inherits, and a wrong one is refused."""

import pytest

from service_kit.errors import ServiceError


class Broken(ServiceError, code="broken", status=503, title="It is broken", retry_after_s=5):
    pass


class Torn(Broken, code="torn", recurs=True):
    pass


def test_keywords_declare_an_error_and_the_rest_is_inherited():
    assert (Torn.code, Torn.status, Torn.title, Torn.retry_after_s) == ("torn", 503, "It is broken", 5)
    assert (ServiceError.recurs, Broken.recurs, Torn.recurs) == (False, False, True)
    assert list(Broken.tree()) == [Broken, Torn]


def test_a_code_that_another_class_of_the_service_has_is_refused():
    with pytest.raises(TypeError, match="Worn has the code 'torn', which is that of Torn"):
        type("Worn", (ServiceError,), {"__module__": __name__}, code="torn")
    assert type("Worn", (ServiceError,), {"__module__": "another.service"}, code="torn").code == "torn"


def test_a_status_is_one_of_http():
    with pytest.raises(ValueError, match="600 is not a valid HTTPStatus"):
        type("Odd", (ServiceError,), {}, status=600)
