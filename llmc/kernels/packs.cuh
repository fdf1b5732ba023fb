// packs.cuh: elements moved by packs of 16 bytes, as floats.
//
// Kernels are templates over W, the elements of a step: x128::size if the row length is a
// multiple of it, else 1. All arrays begin at multiples of 16 bytes. ELEMENT_PACK is longer
// on a CPU: a vector register.
//
// defines: Packed128 as x128 and f128, load128, store128, unpack, load_floats, Late,
//          load_late, unpack_late, store_floats, store_whole, store_whole_floats, sum_of,
//          max_of, ELEMENT_PACK, by_packs
#ifndef LLMC_PACKS_CUH
#define LLMC_PACKS_CUH

#include <type_traits>

#include "llmc/kernels/shares.cuh"

// 16 bytes of elements, moved at once, from and to addresses that are multiples of 16.
template <class T>
struct alignas(16) Packed128 {
    static constexpr size_t size = 16 / sizeof(T);
    T v[16 / sizeof(T)];
};
typedef Packed128<floatX> x128;
typedef Packed128<float> f128;

template <class T>
__device__ static __forceinline__ Packed128<T> load128(const T *p) {
    Packed128<T> pack;
#ifdef __CUDACC__
    int4 bits = *reinterpret_cast<const int4 *>(p);
    memcpy(&pack, &bits, sizeof bits);
#else
    cpu_check_aligned(p);
    memcpy(&pack, p, sizeof pack);
#endif
    return pack;
}

template <class T>
__device__ static __forceinline__ void store128(T *p, const Packed128<T> &pack) {
#ifdef __CUDACC__
    int4 bits;
    memcpy(&bits, &pack, sizeof bits);
    *reinterpret_cast<int4 *>(p) = bits;
#else
    cpu_check_aligned(p);
    memcpy(p, &pack, sizeof pack);
#endif
}

#ifdef __CUDACC__
__device__ static __forceinline__ void cpu_check_aligned(const void *) {
}  // a GPU faults
#endif

static constexpr int ELEMENT_PACK = ROW_LANES > 1 ? (int)x128::size : 16;

// Calls launch with the constant PACK if rows of n elements consist of whole packs, else
// with 1.
template <int PACK = (int)x128::size, class Launch>
static inline void by_packs(size_t n, Launch launch) {
    if (n % PACK == 0)
        launch(std::integral_constant<int, PACK>());
    else
        launch(std::integral_constant<int, 1>());
}

template <typename T>
__device__ __forceinline__ void unpack(float *out, const Packed128<T> &pack) {
    for (size_t k = 0; k < pack.size; k++) out[k] = to_float(pack.v[k]);
}
template <typename T>
__device__ __forceinline__ Packed128<T> pack_floats(const float *in) {
    Packed128<T> pack;
    for (size_t k = 0; k < pack.size; k++) pack.v[k] = from_float<T>(in[k]);
    return pack;
}
#ifndef __CUDACC__  // a CPU is slow at eight bfloat16 one by one
template <>
inline void unpack(float *out, const Packed128<__nv_bfloat16> &pack) {
    bf16x8_to_float(out, &pack.v[0].__x);
}
template <>
inline Packed128<__nv_bfloat16> pack_floats<__nv_bfloat16>(const float *in) {
    Packed128<__nv_bfloat16> pack;
    bf16x8_from_float(&pack.v[0].__x, in);
    return pack;
}
#endif

// Reads W elements of type T at p as floats: by 128-bit loads if W fills them.
template <int W, typename T>
__device__ __forceinline__ void load_floats(float (&out)[W], const T *p) {
    constexpr int size = 16 / sizeof(T);
    if constexpr (W % size == 0) cpu_check_aligned(p);
    if constexpr (W % size == 0 && (ELEMENT_PACK < 16 || size == 8)) {
        for (int i = 0; i < W; i += size) unpack(out + i, load128(p + i));
    } else {
        for (int k = 0; k < W; k++) out[k] = to_float(p[k]);
    }
}

// W elements that may still be on their way from memory. They are words because a compiler
// unpacks elements right behind the load, and so waits for them there.
template <int W>
struct Late {
    Packed128<uint32_t> packs[W / x128::size];
};
template <>
struct Late<1> {
    floatX element;
};

template <int W>
__device__ __forceinline__ void load_late(Late<W> &late, const floatX *p) {
    if constexpr (W == 1)
        late.element = *p;
    else
        for (size_t i = 0; i < W / x128::size; i++)
            late.packs[i] = load128((const uint32_t *)(p + i * x128::size));
}
template <int W>
__device__ __forceinline__ void unpack_late(float (&out)[W], const Late<W> &late) {
    if constexpr (W == 1) {
        out[0] = to_float(late.element);
    } else {
        for (size_t i = 0; i < W / x128::size; i++) {
            x128 pack;
            memcpy(&pack, &late.packs[i], sizeof pack);
            unpack(out + i * x128::size, pack);
        }
    }
}

// Writes W floats to p, rounded to T.
template <int W, typename T>
__device__ __forceinline__ void store_floats(T *p, const float (&in)[W]) {
    constexpr int size = 16 / sizeof(T);
    if constexpr (W % size == 0) cpu_check_aligned(p);
    if constexpr (W % size == 0 && (ELEMENT_PACK < 16 || size == 8)) {
        for (int i = 0; i < W; i += size) store128(p + i, pack_floats<T>(in + i));
    } else if constexpr (W == 4 && sizeof(T) == 2) {
        alignas(8) T pack[4];
        for (int k = 0; k < W; k++) pack[k] = from_float<T>(in[k]);
        memcpy(__builtin_assume_aligned((void *)p, 8), pack, sizeof pack);
    } else {
        for (int k = 0; k < W; k++) p[k] = from_float<T>(in[k]);
    }
}

// Writes 16 bytes to global memory at once. If a compiler has computed them in several
// steps, it would split the store in four.
__device__ __forceinline__ void store_whole(void *p, const uint32_t (&w)[4]) {
#ifdef __CUDACC__
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
#else
    cpu_check_aligned(p);
    memcpy(p, w, sizeof w);
#endif
}

// Does store_floats by whole stores, for elements of a GPU's packs.
template <int W>
__device__ __forceinline__ void store_whole_floats(floatX *p, const float (&in)[W]) {
    if constexpr (W == x128::size && ROW_LANES > 1) {
        x128 pack = pack_floats<floatX>(in);
        uint32_t words[4];
        memcpy(words, &pack, sizeof words);
        store_whole(p, words);
    } else {
        store_floats<W>(p, in);
    }
}

// Returns the sum or the largest of W numbers, by halves: W is a power of two. The largest
// ignores NaNs.
template <bool SUM, int W, typename T>
__device__ __forceinline__ T reduce_of(const T (&x)[W]) {
    T y[W];
    for (int k = 0; k < W; k++) y[k] = x[k];
    for (int half = W / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++)
            y[k] = SUM ? y[k] + y[k + half] : larger(y[k], y[k + half]);
    return y[0];
}
template <int W, typename T>
__device__ __forceinline__ T sum_of(const T (&x)[W]) {
    return reduce_of<true, W>(x);
}
template <int W, typename T>
__device__ __forceinline__ T max_of(const T (&x)[W]) {
    return reduce_of<false, W>(x);
}

#endif
