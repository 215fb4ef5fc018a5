// Vectors of float32 as GCC and Clang know them, and what is missing there. Included by isa.hpp only.
#pragma once

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton::kernels::BATON_ISA {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
// Lanes of a vector.
constexpr int kLanes = kBytes / 4;

typedef float Vector __attribute__((vector_size(kBytes)));
typedef int32_t Integers __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
typedef float UnalignedVector __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint16_t UnalignedHalves __attribute__((vector_size(kBytes / 2), aligned(2), may_alias));

#define BATON_INLINE inline __attribute__((always_inline))

struct Float32 {
    typedef float Element;
    static BATON_INLINE Vector load(const float *from) { return *reinterpret_cast<const UnalignedVector *>(from); }
    static BATON_INLINE void store(float *to, Vector value) { *reinterpret_cast<UnalignedVector *>(to) = value; }
    static BATON_INLINE float load1(const float *from) { return *from; }
    static BATON_INLINE void store1(float *to, float value) { *to = value; }
};

struct Bfloat16 {
    typedef uint16_t Element;
    static BATON_INLINE Vector load(const uint16_t *from) {
        const Halves halves = *reinterpret_cast<const UnalignedHalves *>(from);
        return (Vector)(__builtin_convertvector(halves, Integers) << 16);
    }
    // Round to nearest, ties to even. What is not a number may come out as another one that is not.
    static BATON_INLINE void store(uint16_t *to, Vector value) {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
        Integers bits = (Integers)value;
        bits = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16;
        *reinterpret_cast<UnalignedHalves *>(to) = __builtin_convertvector(bits, Halves);
#endif
    }
    static BATON_INLINE float load1(const uint16_t *from) {
        const uint32_t bits = static_cast<uint32_t>(*from) << 16;
        float value;
        __builtin_memcpy(&value, &bits, 4);
        return value;
    }
    static BATON_INLINE void store1(uint16_t *to, float value) {
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        *to = static_cast<uint16_t>((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16);
    }
};

BATON_INLINE Vector broadcast(float value) { return Vector{} + value; }

BATON_INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

BATON_INLINE Vector magnitude(Vector a) { return (Vector)((Integers)a & 0x7FFFFFFF); }

BATON_INLINE float sum(Vector a) {
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += a[lane];
    return total;
}

BATON_INLINE float largest(Vector a) {
    float best = a[0];
    for (int lane = 1; lane < kLanes; ++lane) best = a[lane] > best ? a[lane] : best;
    return best;
}

// Nearest integers, for magnitudes below 2^22: the sum with 1.5 * 2^23 has them in its last bits.
BATON_INLINE Integers nearest(Vector a) {
    const float magic = 12582912.0f;
    return (Integers)(a + magic) - 0x4B400000;
}

// 2^a with a relative error below 3e-7; 0 below 2^-126; a at most 127.
BATON_INLINE Vector exp2(Vector a) {
    const Vector clamped = larger(a, broadcast(-126.0f));
    const Integers whole = nearest(clamped);
    const Vector part = clamped - __builtin_convertvector(whole, Vector);
    // Taylor's series of exp(part * ln 2), |part| <= 1/2: the first term left out is below 1.3e-8 of the sum.
    Vector value = broadcast(1.5252734e-5f);
    value = value * part + 1.5403530e-4f;
    value = value * part + 1.3333558e-3f;
    value = value * part + 9.6181291e-3f;
    value = value * part + 5.5504109e-2f;
    value = value * part + 2.4022651e-1f;
    value = value * part + 6.9314718e-1f;
    value = value * part + 1.0f;
    const Vector result = value * (Vector)((whole + 127) << 23);
    return a < broadcast(-126.0f) ? Vector{} : result;
}

}  // namespace baton::kernels::BATON_ISA
