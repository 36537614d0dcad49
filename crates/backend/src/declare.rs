//! The macro that declares both traits of a device from one list of methods.

/// Declares [`Backend`] and [`Kernels`] from a list of methods: `where` names the check of the
/// operands, `=>` what a device does that does not implement the method.
macro_rules! ops {
    ($(
        $(#[$doc:meta])*
        fn $op:ident(&$this:ident $(, $arg:ident: $type:ty)* $(,)?) -> $result:ty
            $(where $check:expr)?
            $(=> $default:block)?;
    )*) => {
        /// A device: memory, and the ops of a transformer step.
        ///
        /// Buffers hold f32 activations, `[rows, cols]` without padding; they may be longer than
        /// the step needs. Each fused op documents its unfused equivalent; the conformance suite
        /// tests that both are equal. Operands of wrong shape are rejected before any work.
        ///
        /// A device implements [`Kernels`], and thereby is a `Backend`; nothing else can be one.
        pub trait Backend: Send + Sync + Sized + 'static {
            /// f32 activations on the device.
            type Buffer: Buffer;
            /// A weight matrix in the device's own layout.
            type Matrix: Matrix;
            /// The matrices of experts in the device's own layout.
            type Experts: Experts;
            /// Cache memory.
            type Page: Page;

            /// Runs `ops`, the ops of one step. `is_decode` states that each sequence has one row
            /// in it. `ops` read nothing back, so a device may record them and launch them as a
            /// whole when they end.
            fn step<T, E: From<BackendError>>(
                &self,
                is_decode: bool,
                ops: impl FnOnce() -> std::result::Result<T, E>,
            ) -> std::result::Result<T, E>;

            /// Returns a device that chooses kernels as this one does, computes nothing, and notes
            /// them; `None` where no kernel takes time to load. Steps on it may take weights of
            /// this device and memory of its own.
            fn rehearsal(&self) -> Option<Self>;

            /// Loads the kernels that `rehearsal` has noted, on all cores. Returns how many they
            /// are.
            fn load_kernels(&self, rehearsal: &Self) -> Result<usize>;

            $($(#[$doc])* fn $op(&self $(, $arg: $type)*) -> $result;)*
        }

        /// What a device implements: the methods of [`Backend`], which has checked the operands.
        /// On others they may panic, or compute on other memory of the device: code that calls a
        /// device imports `Backend`.
        pub trait Kernels: Send + Sync + Sized + 'static {
            /// See [`Backend::Buffer`].
            type Buffer: Buffer;
            /// See [`Backend::Matrix`].
            type Matrix: Matrix;
            /// See [`Backend::Experts`].
            type Experts: Experts;
            /// See [`Backend::Page`].
            type Page: Page;

            /// See [`Backend::step`].
            fn step<T, E: From<BackendError>>(
                &self,
                is_decode: bool,
                ops: impl FnOnce() -> std::result::Result<T, E>,
            ) -> std::result::Result<T, E> {
                let _ = is_decode;
                ops()
            }

            /// See [`Backend::rehearsal`].
            fn rehearsal(&self) -> Option<Self> {
                None
            }

            /// See [`Backend::load_kernels`].
            fn load_kernels(&self, rehearsal: &Self) -> Result<usize> {
                let _ = rehearsal;
                Ok(0)
            }

            $(ops! {
                @kernel
                #[doc = concat!("See [`Backend::", stringify!($op), "`].")]
                fn $op(&$this $(, $arg: $type)*) -> $result, [$($default)?]
            })*
        }

        impl<D: Kernels> Backend for D {
            type Buffer = D::Buffer;
            type Matrix = D::Matrix;
            type Experts = D::Experts;
            type Page = D::Page;

            #[inline]
            fn step<T, E: From<BackendError>>(
                &self,
                is_decode: bool,
                ops: impl FnOnce() -> std::result::Result<T, E>,
            ) -> std::result::Result<T, E> {
                Kernels::step(self, is_decode, ops)
            }

            #[inline]
            fn rehearsal(&self) -> Option<Self> {
                Kernels::rehearsal(self)
            }

            #[inline]
            fn load_kernels(&self, rehearsal: &Self) -> Result<usize> {
                Kernels::load_kernels(self, rehearsal)
            }

            $(
                #[inline]
                fn $op(&self $(, $arg: $type)*) -> $result {
                    $($check?;)?
                    Kernels::$op(self $(, $arg)*)
                }
            )*
        }
    };
    (@kernel #[$doc:meta] fn $op:ident($($args:tt)*) -> $result:ty, []) => {
        #[$doc]
        fn $op($($args)*) -> $result;
    };
    (@kernel #[$doc:meta] fn $op:ident($($args:tt)*) -> $result:ty, [$default:block]) => {
        #[$doc]
        fn $op($($args)*) -> $result $default
    };
}
