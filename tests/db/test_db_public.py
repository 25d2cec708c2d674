import weighbridge.db


def test_all_names_the_public_surface():
    names = weighbridge.db.__all__
    assert names == sorted(names)
    assert all(hasattr(weighbridge.db, name) for name in names)


def test_every_error_is_a_store_error_with_a_message_and_a_hint():
    from weighbridge.db import StoreError

    public = [getattr(weighbridge.db, name) for name in weighbridge.db.__all__]
    errors = [value for value in public if isinstance(value, type) and issubclass(value, Exception)]
    assert len(errors) >= 10
    for error in errors:
        assert issubclass(error, StoreError)
        raised = error("what must hold", hint="what to do")
        assert (str(raised), raised.message, raised.hint) == (
            "what must hold",
            "what must hold",
            "what to do",
        )
