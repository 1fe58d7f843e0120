// From sparse rows to a tile for the matrix product, and from products to the Gram matrix.
//
// A tile holds (value - shift) * scale for each column: the shift, near the column's mean, takes
// away what would cancel later, and the scale, a power of two, keeps the column within half
// precision's range. FORM tells how a number x is stored:
//   0  float16 pair: high = half(x), low = half((x - high) * 2048); 22 bits together
//   1  float32
//   2  pair of float32: high = x to TF32's 11 bits, low = x - high
//   3  float64

#if FORM == 0
typedef unsigned short STORED;
typedef float WORK;
#elif FORM == 3
typedef double STORED;
typedef double WORK;
#else
typedef float STORED;
typedef float WORK;
#endif

#if FORM == 0
#define LOW_SCALE 2048.0f
__device__ __forceinline__ unsigned short to_half(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
__device__ __forceinline__ float from_half(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
#endif

// Blocks: rows of the tile by pieces of its columns. The tile is `padded` columns wide, twice that
// for a pair (all high parts, then all low parts). Rows at and after n_rows, and columns after
// n_cols, are zero. base: what a column without a stored value holds, padded columns of it.
extern "C" __global__ void fill_tile(
    const int64* indptr, const INDEX* indices, const VALUE* data, const double* factor,
    int transform, int64 first_row, int64 n_rows, int padded, int piece, const double* shift,
    const double* scale, const WORK* base, STORED* tile) {
    extern __shared__ WORK line[];
    const int64 row = first_row + blockIdx.x;
    const int low = blockIdx.y * piece;
    const int n = min(piece, padded - low);
    if (row < n_rows) {
        for (int j = threadIdx.x; j < n; j += blockDim.x) line[j] = base[low + j];
        __syncthreads();
        const int64 last = indptr[row + 1];
        const double s = transform == IDENTITY ? 1.0 : factor[row];
        for (int64 k = indptr[row] + threadIdx.x; k < last; k += blockDim.x) {
            const int j = (int)indices[k];
            if (j < low || j >= low + n) continue;
            const double x = transformed((double)data[k], s, transform);
            line[j - low] = (WORK)((x - shift[j]) * scale[j]);
        }
    } else {
        for (int j = threadIdx.x; j < n; j += blockDim.x) line[j] = (WORK)0;
    }
    __syncthreads();
#if FORM == 0
    uint4* high = (uint4*)(tile + (int64)blockIdx.x * 2 * padded + low);
    uint4* lower = high + padded / 8;
    for (int j = threadIdx.x; j < n / 8; j += blockDim.x) {
        uint32 h[4], l[4];
        #pragma unroll
        for (int a = 0; a < 4; a++) {
            const float x = line[8 * j + 2 * a], y = line[8 * j + 2 * a + 1];
            const unsigned short hx = to_half(x), hy = to_half(y);
            h[a] = hx | (uint32)hy << 16;
            l[a] = to_half((x - from_half(hx)) * LOW_SCALE) |
                   (uint32)to_half((y - from_half(hy)) * LOW_SCALE) << 16;
        }
        high[j] = make_uint4(h[0], h[1], h[2], h[3]);
        lower[j] = make_uint4(l[0], l[1], l[2], l[3]);
    }
#elif FORM == 2
    float* out = tile + (int64)blockIdx.x * 2 * padded + low;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const float x = line[j];
        // Round to nearest at TF32's last bit.
        const float high = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
        out[j] = high;
        out[padded + j] = x - high;
    }
#else
    STORED* out = tile + (int64)blockIdx.x * padded + low;
    for (int j = threadIdx.x; j < n; j += blockDim.x) out[j] = line[j];
#endif
}

// Blocks: columns by rows of a panel. sums += products[0] + products[1] + ..., in float64; a
// product is n_columns wide, the sums `ld`.
extern "C" __global__ void add_products(
    const PRODUCT* products, int64 n_columns, int64 stride, int n_products, int64 ld,
    double* sums) {
    const int64 j = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= n_columns) return;
    const PRODUCT* product = products + (int64)blockIdx.y * n_columns + j;
    double sum = 0.0;
    #pragma unroll 4
    for (int b = 0; b < n_products; b++) sum += (double)product[b * stride];
    sums[(int64)blockIdx.y * ld + j] += sum;
}

// Takes scale and shift back and adds the block to the Gram matrix. `sums` is padded by `ld`, its
// upper triangle filled; for pairs, ld is 2 * padded and the cross products stand in its right
// half, low_weight their unit.
// The diagonal is known from float64 sums: `squares`.
// Of the corner from n_dense on, only the upper triangle is filled: kernels/gram.py, finish().
extern "C" __global__ void add_gram(
    const double* sums, int64 ld, int padded, double low_weight, int n_cols, int n_dense,
    double n_rows, const double* shift, const double* scale, const double* totals,
    const double* squares, double* gram) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    const int i = blockIdx.y * blockDim.y + threadIdx.y;
    if (i >= n_cols || j >= n_cols || (i > j && j >= n_dense)) return;
    if (i == j) {
        gram[(int64)i * n_cols + i] += squares[i];
        return;
    }
    // The same arithmetic for (i, j) and (j, i): the result is exactly symmetric.
    const int a = min(i, j), b = max(i, j);
    double x = sums[a * ld + b];
    if (low_weight != 0.0)
        x += low_weight * (sums[a * ld + padded + b] + sums[b * ld + padded + a]);
    x /= scale[a] * scale[b];
    const double rest_a = totals[a] - n_rows * shift[a], rest_b = totals[b] - n_rows * shift[b];
    x += n_rows * shift[a] * shift[b] + (shift[a] * rest_b + shift[b] * rest_a);
    gram[(int64)i * n_cols + j] += x;
}
