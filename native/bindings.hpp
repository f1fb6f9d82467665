// How arguments of Python reach the core: arrays by the buffer protocol, without a copy.
#pragma once

#include <stdio.h>  // which nanobind takes for granted, and Python does not bring with the stable ABI

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "families.hpp"

namespace nb = nanobind;

namespace sm {

// A contiguous array of one type, which is held for the length of a call. Bytes take any type;
// uint16 also float16, whose patterns they are.
template <class T>
struct Array {
    T *data = nullptr;
    int64_t size = 0;  // of all dimensions
    int64_t rows = 0, columns = 0;  // of the first dimension; of all others together
    Py_buffer view{};

    Array() = default;
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    ~Array() { PyBuffer_Release(&view); }

    static constexpr bool written = !std::is_const_v<T>;
    using Value = std::remove_const_t<T>;

    bool take(PyObject *object) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object, &view, flags) != 0) {
            PyErr_Clear();
            return false;
        }
        if (!fits(view.format ? view.format : "B")) return false;
        data = static_cast<T *>(view.buf);
        size = view.len / static_cast<int64_t>(sizeof(T));
        rows = view.ndim && sizeof(T) == static_cast<size_t>(view.itemsize) ? view.shape[0] : size;
        columns = rows ? size / rows : 0;
        if (view.ndim > 1 && !rows)
            for (int i = columns = 1; i < view.ndim; i++) columns *= view.shape[i];
        return true;
    }

  private:
    bool fits(const char *format) const {
        if constexpr (std::is_same_v<Value, uint8_t>) return true;
        if (*format == '<' || *format == '=' || *format == '@') format++;
        if (view.itemsize != sizeof(T) || format[0] == 0 || format[1] != 0) return false;
        switch (format[0]) {
        case 'f': case 'd': return std::is_floating_point_v<Value>;
        case 'e': return std::is_same_v<Value, uint16_t>;
        case 'b': case 'h': case 'i': case 'l': case 'q': return std::is_integral_v<Value> && std::is_signed_v<Value>;
        case 'B': case 'H': case 'I': case 'L': case 'Q': return std::is_integral_v<Value> && std::is_unsigned_v<Value>;
        default: return false;
        }
    }
};


inline void expect(bool holds, const char *what) {
    if (!holds) throw nb::value_error(what);
}

// The table of members as the core reads it; a type that is none of the core's is an error.
inline const Source *members_of(const Array<const int64_t> &table) {
    expect(table.columns == 3 || table.rows == 0, "members are an int64 table (members, 3)");
    for (int64_t d = 0; d < table.rows; d++)
        expect(table.data[3 * d] >= BF16 && table.data[3 * d] <= F32, "a member has no known type");
    return reinterpret_cast<const Source *>(table.data);
}

using Free = nb::gil_scoped_release;

}  // namespace sm

namespace nanobind::detail {

template <class T>
struct type_caster<sm::Array<T>> {
    NB_TYPE_CASTER(sm::Array<T>, const_name("ndarray"))

    bool from_python(handle source, uint32_t, cleanup_list *) noexcept { return value.take(source.ptr()); }
    static handle from_cpp(const sm::Array<T> &, rv_policy, cleanup_list *) noexcept { return {}; }
};

}  // namespace nanobind::detail
