// What layers do to each token by itself. Included by isa.hpp only.
#pragma once

namespace baton::kernels::BATON_ISA {

template <typename Type>
void rms_norm_row(const typename Type::Element *x, const typename Type::Element *weight, typename Type::Element *out,
                  int64_t size, float eps) {
    Vector squares{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Vector value = Type::load(x + i);
        squares += value * value;
    }
    float total = sum(squares);
    for (; i < size; ++i) total += Type::load1(x + i) * Type::load1(x + i);
    const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes)
        Type::store(out + i, Type::load(x + i) * factor * Type::load(weight + i));
    for (; i < size; ++i) Type::store1(out + i, Type::load1(x + i) * factor * Type::load1(weight + i));
}

BATON_INLINE Vector silu(Vector x) {
    // Beyond 80 both exp(-x) and its neglect are exact in float32.
    const Vector power = x * -1.44269504f;
    return x / (1.0f + exp2(power > broadcast(120.0f) ? broadcast(120.0f) : power));
}

template <typename Type>
void silu_and_mul_row(const typename Type::Element *gate, typename Type::Element *out, int64_t inner) {
    const typename Type::Element *up = gate + inner;
    int64_t i = 0;
    for (; i + kLanes <= inner; i += kLanes) Type::store(out + i, silu(Type::load(gate + i)) * Type::load(up + i));
    for (; i < inner; ++i) Type::store1(out + i, silu(broadcast(Type::load1(gate + i)))[0] * Type::load1(up + i));
}

template <typename Type>
void rotate_row(typename Type::Element *x, const typename Type::Element *cos, const typename Type::Element *sin,
                int64_t heads, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t head = 0; head < heads; ++head) {
        typename Type::Element *first = x + head * head_dim, *second = first + half;
        int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            const Vector a = Type::load(first + i), b = Type::load(second + i);
            Type::store(first + i, a * Type::load(cos + i) + b * Type::load(sin + i));
            Type::store(second + i, b * Type::load(cos + half + i) + a * Type::load(sin + half + i));
        }
        for (; i < half; ++i) {
            const float a = Type::load1(first + i), b = Type::load1(second + i);
            Type::store1(first + i, a * Type::load1(cos + i) + b * Type::load1(sin + i));
            Type::store1(second + i, b * Type::load1(cos + half + i) + a * Type::load1(sin + half + i));
        }
    }
}

// Sylvester's Hadamard transform of `size` values, a power of two, without its factor size^-1/2.
inline void hadamard(float *x, int64_t size) {
    for (int64_t half = size / 2; half >= 1; half /= 2) {
        for (int64_t block = 0; block < size; block += 2 * half) {
            float *first = x + block, *second = first + half;
            int64_t i = 0;
            for (; i + kLanes <= half; i += kLanes) {
                const Vector a = Float32::load(first + i), b = Float32::load(second + i);
                Float32::store(first + i, a + b);
                Float32::store(second + i, a - b);
            }
            for (; i < half; ++i) {
                const float a = first[i], b = second[i];
                first[i] = a + b;
                second[i] = a - b;
            }
        }
    }
}

template <typename Type>
void quantize_row(const typename Type::Element *x, uint8_t *tokens, int64_t stride, float *scale, float *values,
                  int64_t size, int64_t block) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) Float32::store(values + i, Type::load(x + i));
    for (; i < size; ++i) values[i] = Type::load1(x + i);
    if (block > 1)
        for (int64_t start = 0; start < size; start += block) hadamard(values + start, block);
    Vector best{};
    for (i = 0; i + kLanes <= size; i += kLanes) best = larger(best, magnitude(Float32::load(values + i)));
    float most = largest(best);
    for (; i < size; ++i) most = __builtin_fabsf(values[i]) > most ? __builtin_fabsf(values[i]) : most;
    most = most > 1e-30f ? most : 1e-30f;
    const float factor = 127.0f / most;
    for (i = 0; i + kLanes <= size; i += kLanes) {
        typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
        const Bytes bytes = __builtin_convertvector(nearest(Float32::load(values + i) * factor) + 128, Bytes);
        __builtin_memcpy(tokens + i, &bytes, kLanes);
    }
    for (; i < size; ++i) tokens[i] = static_cast<uint8_t>(nearest(broadcast(values[i] * factor))[0] + 128);
    for (; i < stride; ++i) tokens[i] = 128;
    *scale = most / 127.0f / __builtin_sqrtf(static_cast<float>(block));
}

// Calls `body` with Float32 or Bfloat16.
#define BATON_BY_TYPE(body)        \
    if (bfloat16) {                \
        typedef Bfloat16 Type;     \
        typedef uint16_t Element;  \
        body                       \
    } else {                       \
        typedef Float32 Type;      \
        typedef float Element;     \
        body                       \
    }

inline void rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t size, float eps,
                     bool bfloat16) {
    BATON_BY_TYPE(for (int64_t row = 0; row < rows; ++row) rms_norm_row<Type>(
        static_cast<const Element *>(x) + row * size, static_cast<const Element *>(weight),
        static_cast<Element *>(out) + row * size, size, eps);)
}

inline void silu_and_mul(const void *x, void *out, int64_t rows, int64_t inner, bool bfloat16) {
    BATON_BY_TYPE(for (int64_t row = 0; row < rows; ++row) silu_and_mul_row<Type>(
        static_cast<const Element *>(x) + row * 2 * inner, static_cast<Element *>(out) + row * inner, inner);)
}

inline void rotate(void *x, int64_t stride, const void *cos, const void *sin, int64_t rows, int64_t heads,
                   int64_t head_dim, bool bfloat16) {
    BATON_BY_TYPE(for (int64_t row = 0; row < rows; ++row) rotate_row<Type>(
        static_cast<Element *>(x) + row * stride, static_cast<const Element *>(cos) + row * head_dim,
        static_cast<const Element *>(sin) + row * head_dim, heads, head_dim);)
}

inline void quantize(const void *x, uint8_t *tokens, int64_t stride, float *scales, float *scratch, int64_t rows,
                     int64_t size, int64_t block, bool bfloat16) {
    BATON_BY_TYPE(for (int64_t row = 0; row < rows; ++row) quantize_row<Type>(
        static_cast<const Element *>(x) + row * size, tokens + row * stride, stride, scales + row, scratch, size, block);)
}

}  // namespace baton::kernels::BATON_ISA
