// What every kernel file starts with. VALUE and INDEX are set at compile time to the types of the
// stored values and of the column indices; the host has checked that indices are in range.

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;

#define ALL_LANES 0xffffffffu
#define LARGEST_DOUBLE 1.7976931348623157e308

// The same codes as scgpu_tasks.kernels.transform.Transform, and one more.
#define IDENTITY 0
#define SCALE 1
#define LOG1P 2
#define EXPM1 3
#define CLIP 4

__device__ __forceinline__ double transformed(double x, double factor, int transform) {
    switch (transform) {
        case SCALE: return x * factor;
        case LOG1P: return log1p(x * factor);
        case EXPM1: return expm1(x);
        case CLIP: return x < factor ? x : factor;
        default: return x;
    }
}

// Sum over the lanes of a warp, in a fixed order; every lane gets it.
__device__ __forceinline__ double warp_sum(double x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ int warp_count(int x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Bit of each column for which `member` holds, in shared memory; all threads of the block.
template <typename Member>
__device__ __forceinline__ void column_bits(uint32* bits, int n_cols, Member member) {
    const int padded = (n_cols + 31) & ~31;
    // Whole warps take the same number of turns, so that all lanes meet in the ballot.
    for (int column = threadIdx.x; column < padded; column += blockDim.x) {
        const uint32 word = __ballot_sync(ALL_LANES, column < n_cols && member(column));
        if ((threadIdx.x & 31) == 0) bits[column >> 5] = word;
    }
    __syncthreads();
}

__device__ __forceinline__ bool has_bit(const uint32* bits, int64 column) {
    return (bits[column >> 5] >> (column & 31)) & 1u;
}

__device__ __forceinline__ int64 first_warp() {
    return ((int64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
}

__device__ __forceinline__ int64 all_warps() {
    return ((int64)gridDim.x * blockDim.x) >> 5;
}
